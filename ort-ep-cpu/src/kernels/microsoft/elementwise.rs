//! Elementwise contrib operators that are defined by a formula.

use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;

use crate::cpu_kernels;
use crate::kernels::elementwise::formula::formula;

cpu_kernels![KernelDef { domain: MICROSOFT, ..formula("BiasGelu") }];
