//! Errors of the command line that only a command can see, such as flags that exclude each other.

use std::fmt;

/// A wrong command line. The program ends with exit code 2, as for the errors that clap finds.
#[derive(Debug)]
pub(crate) struct WrongUsage(pub(crate) String);

impl fmt::Display for WrongUsage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}

/// Returns a [`WrongUsage`] from the function.
macro_rules! wrong_usage {
    ($($text:tt)+) => {
        return Err($crate::usage::WrongUsage(format!($($text)+)).into())
    };
}
pub(crate) use wrong_usage;
