//! Functions of registers: in one lane, and in all lanes of a warp.

/// The threads of a warp.
pub(crate) const LANES: usize = 32;

/// The values of a register in the lanes of a warp.
pub(crate) type Row = [u64; LANES];

/// Declares the trait of the functions of some registers: in one lane, and in all lanes at once.
macro_rules! of_registers {
    ($(#[$doc:meta] $name:ident, $short:ident, $vector:ident: $($operand:ident)+;)*) => { $(
        #[$doc]
        pub(crate) trait $name: Sync {
            fn one(&self, $($operand: u64),+) -> u64;
            fn all(&self, $($operand: &Row),+) -> Row;
        }

        pub(crate) type $short = &'static dyn $name;

        impl<F: Fn($(of_registers!(@u64 $operand)),+) -> u64 + Sync> $name for F {
            fn one(&self, $($operand: u64),+) -> u64 {
                self($($operand),+)
            }

            fn all(&self, $($operand: &Row),+) -> Row {
                #[cfg(target_arch = "x86_64")]
                if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
                    // SAFETY: the CPU has both.
                    return unsafe { $vector(self, $($operand),+) };
                }
                std::array::from_fn(|lane| self($($operand[lane]),+))
            }
        }

        /// The lanes as a loop that the compiler vectorizes, with `mul_add` as an instruction.
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn $vector<F>(f: &F, $($operand: &Row),+) -> Row
        where
            F: Fn($(of_registers!(@u64 $operand)),+) -> u64,
        {
            let mut row = [0; LANES];
            for (lane, value) in row.iter_mut().enumerate() {
                *value = f($($operand[lane]),+);
            }
            row
        }
    )* };
    (@u64 $operand:ident) => { u64 };
}

of_registers! {
    /// A function of one register.
    Unary, F1, unary_vector: a;
    /// A function of two registers.
    Binary, F2, binary_vector: a b;
    /// A function of three registers.
    Ternary, F3, ternary_vector: a b c;
    /// A function of four registers.
    Quaternary, F4, quaternary_vector: a b c e;
}
