//! Elementwise contrib operators that are defined by a formula.

use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;

use crate::elementwise::formula::formula;
use ort_cpu_kernel::cpu_kernels;

cpu_kernels![KernelDef { domain: MICROSOFT, ..formula("BiasGelu") }];
