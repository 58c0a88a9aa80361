//! The epilogues of matmuls and convolutions, as patterns.
