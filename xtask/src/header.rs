//! `cargo xtask header`: generates `ort_provider.h`, the C header of provider libraries, from the
//! Rust structs of the ABI.

use std::fs;

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;

/// The Rust structs and the header, relative to the repository's root.
const RECORDS: &str = "ort-core/src/ep/abi/tables.rs";
const HEADER: &str = "ort-core/include/ort_provider.h";

/// The text above the generated declarations.
const OPENING: &str = "\
/*
 * The interface of provider libraries of ort-runtime. A library exports one function, `ort_provider`; docs/PROVIDERS.md
 * tells what it does, and examples/provider-template-c is one.
 *
 * Written by `cargo xtask header` from ort-core/src/ep/abi/tables.rs: change that file instead.
 */";

/// The text below them, which declares the one function of a library.
const CLOSING: &str = "\
#if defined(_WIN32)
#define ORT_PROVIDER_EXPORT __declspec(dllexport)
#else
#define ORT_PROVIDER_EXPORT __attribute__((visibility(\"default\")))
#endif

#ifdef __cplusplus
extern \"C\" {
#endif

/**
 * The one function that a library exports, of the type `OrtProviderEntry`.
 */
ORT_PROVIDER_EXPORT const OrtProviderTable *ort_provider(uint32_t abi_version, const OrtProviderHost *host);

#ifdef __cplusplus
}
#endif";

/// What to do.
#[derive(clap::Args, Default)]
pub(crate) struct HeaderOptions {
    /// Write nothing; fail if the header is stale.
    #[arg(long)]
    pub(crate) check: bool,
}

/// Writes the header, or with `check` fails if it is stale.
pub(crate) fn run(workspace: &Workspace, options: &HeaderOptions) -> Result<()> {
    let header = header(workspace)?;
    let path = workspace.root.join(HEADER);
    if options.check {
        if fs::read_to_string(&path).unwrap_or_default() != header {
            bail!("{HEADER} is stale: run `cargo xtask header`");
        }
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    fs::write(&path, header).with_context(|| format!("cannot write {}", path.display()))?;
    println!("wrote {HEADER}");
    Ok(())
}

fn header(workspace: &Workspace) -> Result<String> {
    let config = cbindgen::Config {
        language: cbindgen::Language::C,
        // cbindgen writes `uintptr_t` for `usize` otherwise.
        usize_is_size_t: true,
        ..cbindgen::Config::default()
    };
    let mut written = Vec::new();
    cbindgen::Builder::new()
        .with_config(config)
        .with_src(workspace.root.join(RECORDS))
        .with_include_guard("ORT_PROVIDER_H")
        .with_cpp_compat(true)
        .with_no_includes()
        .with_sys_include("stddef.h")
        .with_sys_include("stdint.h")
        .with_header(OPENING)
        .with_trailer(CLOSING)
        .with_line_length(110)
        .with_documentation(true)
        // No exported function refers to these types, so cbindgen would leave them out.
        .include_item("OrtProviderEntry")
        .include_item("OrtProviderHost")
        .include_item("OrtProviderTable")
        .generate()
        .with_context(|| format!("cannot read {RECORDS}"))?
        .write(&mut written);
    String::from_utf8(written).context("the header is not UTF-8")
}
