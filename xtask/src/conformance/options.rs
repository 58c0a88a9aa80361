//! What a run of the onnx package's cases covers.

/// The suites, the small and most informative ones first.
pub(super) const SUITES: [&str; 5] = ["simple", "pytorch-operator", "pytorch-converted", "light", "node"];
/// The number of cases of all suites in the pinned package.
pub(super) const CASES: usize = 2033;
/// How many of them are in the suite `node`.
pub(super) const NODE_CASES: usize = 1884;

/// What to run.
#[derive(clap::Args, Clone, Default)]
pub(crate) struct ConformanceOptions {
    /// Run only these suites.
    #[arg(long = "suite", value_name = "NAME", value_parser = SUITES)]
    pub(crate) suites: Vec<String>,
    /// Rewrite the list of known failures from this run.
    #[arg(long, conflicts_with = "poisoned")]
    pub(crate) bless: bool,
    /// Fill output and scratch memory with NaN, so that reads before writes fail.
    #[arg(long)]
    pub(crate) poisoned: bool,
    /// Run the node suite on wgpu's GPU with CPU fallback, against conformance_wgpu.ignore.
    #[arg(long, conflicts_with_all = ["poisoned", "suites"])]
    pub(crate) wgpu: bool,
    /// Run the node suite on CUDA with CPU fallback, against conformance_cuda.ignore: on an
    /// emulator of the NVIDIA driver, or on the driver library that ORT_CUDA_DRIVER names.
    #[arg(long, conflicts_with_all = ["poisoned", "suites", "wgpu"])]
    pub(crate) cuda: bool,
    /// Load the provider of `--wgpu` or `--cuda` as a library.
    #[arg(long)]
    pub(crate) library: bool,
    /// Stay within the limits that every WebGPU implementation has.
    #[arg(long, requires = "wgpu")]
    pub(crate) minimum_limits: bool,
}

impl ConformanceOptions {
    /// The suite's name in `cargo xtask test`.
    pub(crate) fn suite(&self) -> String {
        let parts = [
            (self.poisoned, ", poisoned"),
            (self.wgpu, ", wgpu"),
            (self.cuda, ", cuda"),
            (self.library, " as a library"),
            (self.minimum_limits, ", minimum limits"),
        ];
        parts
            .iter()
            .filter(|(is_said, _)| *is_said)
            .fold("conformance".to_owned(), |name, part| name + part.1)
    }

    /// The number of cases in the pinned package.
    pub(crate) fn cases(&self) -> usize {
        // Devices run only the suite of single nodes.
        if self.wgpu || self.cuda { NODE_CASES } else { CASES }
    }
}
