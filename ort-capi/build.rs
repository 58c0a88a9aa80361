//! Linker flags of the shared library.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libonnxruntime.so.1");
        // Programs unload the library while the threads of our pool sleep in its code.
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}
