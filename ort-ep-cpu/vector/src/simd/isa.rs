//! Instruction set selection, decided once per process.

use std::sync::OnceLock;

use ort_alloc::fork::get_or_init;
use ort_cpu_threads::environment::{ISA, choice};

/// An instruction set that the kernels have code for, ordered from narrow to wide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, on any target.
    Scalar,
    /// 128-bit vectors of AArch64.
    Neon,
    /// 256-bit vectors of x86-64 with fused multiply-add (AVX2, FMA and F16C).
    Avx2,
    /// 512-bit vectors of x86-64 (AVX-512 F, BW, DQ and VL).
    Avx512,
}

impl Isa {
    /// Returns the widest instruction set that this CPU has and `ORT_ISA` allows. `ORT_ISA` may be
    /// `scalar`, `neon`, `avx2` or `avx512`, if the architecture has it. Opening the provider
    /// rejects any other value.
    #[inline]
    pub fn current() -> Isa {
        static CURRENT: OnceLock<Isa> = OnceLock::new();
        *get_or_init(&CURRENT, Isa::choose)
    }

    #[cold]
    fn choose() -> Isa {
        let widest = Isa::widest();
        // An invalid value is ignored here, because opening the provider reports it.
        Isa::allowed().ok().flatten().map_or(widest, |isa| isa.min(widest))
    }

    /// Returns what `ORT_ISA` allows, `None` if it is unset, or an error if its value is unknown.
    pub fn allowed() -> Result<Option<Isa>, String> {
        let of_processor: &[Isa] = if cfg!(target_arch = "x86_64") {
            &[Isa::Scalar, Isa::Avx2, Isa::Avx512]
        } else if cfg!(target_arch = "aarch64") {
            &[Isa::Scalar, Isa::Neon]
        } else {
            &[Isa::Scalar]
        };
        let names: Vec<&'static str> = of_processor.iter().map(|isa| isa.name()).collect();
        Ok(choice(ISA, &names)?.and_then(Isa::from_name))
    }

    /// Returns the widest instruction set of this CPU, regardless of the environment.
    pub fn widest() -> Isa {
        static WIDEST: OnceLock<Isa> = OnceLock::new();
        *get_or_init(&WIDEST, Isa::detect)
    }

    /// Returns every instruction set with code for this CPU, from narrow to wide.
    pub fn available() -> impl Iterator<Item = Isa> {
        let foreign = if cfg!(target_arch = "x86_64") { Some(Isa::Neon) } else { None };
        [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512]
            .into_iter()
            .filter(move |isa| *isa <= Isa::widest() && Some(*isa) != foreign)
    }

    /// Whether this instruction set is AVX-512 and the CPU has AVX512-BF16, that is, bfloat16
    /// products with `f32` accumulators.
    pub fn has_bf16_products(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            self >= Isa::Avx512 && Isa::widest() >= Isa::Avx512 && is_x86_feature_detected!("avx512bf16")
        }
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Returns the instruction set called `name`, in lower case.
    pub fn from_name(name: &str) -> Option<Isa> {
        [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512].into_iter().find(|isa| isa.name() == name)
    }

    /// Returns the name, as `ORT_ISA` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn detect() -> Isa {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        match (avx2, avx512) {
            (true, true) => Isa::Avx512,
            (true, false) => Isa::Avx2,
            _ => Isa::Scalar,
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn detect() -> Isa {
        Isa::Neon
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn detect() -> Isa {
        Isa::Scalar
    }
}
