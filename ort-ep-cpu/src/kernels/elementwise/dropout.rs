//! `Dropout`.

use ort_core::Result;
