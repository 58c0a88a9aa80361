//! Parsers for the numbers of the command line. Each error says which numbers are valid.

use std::num::NonZero;
use std::str::FromStr;
use std::time::Duration;

/// Parses a whole number of 0 or more.
pub(crate) fn whole<N: FromStr>(text: &str) -> Result<N, String> {
    text.parse().map_err(|_| refusal(text, "a whole number of 0 or more"))
}

/// Parses a whole number of 1 or more.
pub(crate) fn positive<N: FromStr>(text: &str) -> Result<N, String> {
    text.parse().map_err(|_| refusal(text, "a whole number of 1 or more"))
}

/// [`positive`], as a plain number.
pub(crate) fn positive_u32(text: &str) -> Result<u32, String> {
    positive(text).map(NonZero::<u32>::get)
}

/// [`positive`], as a plain number.
pub(crate) fn positive_u64(text: &str) -> Result<u64, String> {
    positive(text).map(NonZero::<u64>::get)
}

/// Parses a whole number, which may be negative.
pub(crate) fn integer(text: &str) -> Result<i64, String> {
    text.parse().map_err(|_| match is_whole(text) {
        true => format!("`{text}` is too large"),
        false => format!("`{text}` is not a whole number"),
    })
}

/// Parses a number of 0 or more.
pub(crate) fn from_zero<N: Real>(text: &str) -> Result<N, String> {
    real(text, |number| number >= 0.0, "a number of 0 or more")
}

/// Parses a number above 0.
pub(crate) fn above_zero<N: Real>(text: &str) -> Result<N, String> {
    real(text, |number| number > 0.0, "a number above 0")
}

/// Parses a number of 0 or more and below 1.
pub(crate) fn below_one(text: &str) -> Result<f32, String> {
    real(text, |number| (0.0..1.0).contains(&number), "a number of 0 or more and less than 1")
}

/// Parses a time in seconds.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    // `try_from_secs_f64` rejects negative numbers, NaN and numbers that overflow.
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| format!("`{text}` is not a number of seconds: use 0 or more, such as 1.5"))
}

/// A floating-point type.
pub(crate) trait Real: FromStr + Copy {
    fn widened(self) -> f64;
}

impl Real for f32 {
    fn widened(self) -> f64 {
        self.into()
    }
}

impl Real for f64 {
    fn widened(self) -> f64 {
        self
    }
}

fn real<N: Real>(text: &str, is_right: impl Fn(f64) -> bool, valid: &str) -> Result<N, String> {
    let Ok(number) = text.parse::<N>() else { return Err(format!("`{text}` is not a number: use {valid}")) };
    let widened = number.widened();
    if widened.is_finite() && is_right(widened) { Ok(number) } else { Err(format!("use {valid}")) }
}

fn is_whole(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    !digits.is_empty() && digits.chars().all(|digit| digit.is_ascii_digit())
}

fn refusal(text: &str, valid: &str) -> String {
    match is_whole(text) {
        true if text.starts_with('-') => format!("must not be negative: use {valid}"),
        // The only small number that is refused is 0.
        true if text.chars().all(|digit| digit == '0') => format!("use {valid}"),
        true => format!("`{text}` is too large"),
        false => format!("`{text}` is not {valid}"),
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;

    #[test]
    fn refusals_say_what_is_valid() {
        let error = |refused: Result<NonZeroUsize, String>| refused.unwrap_err();
        assert_eq!(error(positive("0")), "use a whole number of 1 or more");
        assert_eq!(error(positive("-1")), "must not be negative: use a whole number of 1 or more");
        assert_eq!(error(positive("x")), "`x` is not a whole number of 1 or more");
        assert_eq!(whole::<u8>("300").unwrap_err(), "`300` is too large");
        assert_eq!(integer("x").unwrap_err(), "`x` is not a whole number");
        assert_eq!(from_zero::<f32>("abc").unwrap_err(), "`abc` is not a number: use a number of 0 or more");
        assert_eq!(above_zero::<f64>("0").unwrap_err(), "use a number above 0");
        assert!(from_zero::<f32>("nan").is_err() && below_one("1").is_err() && below_one("0").is_ok());
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert!(seconds("-1").is_err() && seconds("soon").is_err());
        assert_eq!((integer("-3"), positive_u32("4"), whole::<u64>("0")), (Ok(-3), Ok(4), Ok(0)));
    }
}
