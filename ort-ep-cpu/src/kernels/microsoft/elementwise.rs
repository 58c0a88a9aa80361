//! Elementwise operators that have a formula and are not the standard's.

use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;

use crate::cpu_kernels;
use crate::kernels::elementwise::formula::formula;

cpu_kernels![KernelDef { domain: MICROSOFT, ..formula("BiasGelu") }];
