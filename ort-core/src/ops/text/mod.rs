//! String processing.

mod strings;
mod tf_idf;
