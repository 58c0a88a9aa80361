//! Sets `ORT_CODE_HASH`, which the key of a compiled cache contains.

fn main() -> std::io::Result<()> {
    ort_build::emit_code_hash()
}
