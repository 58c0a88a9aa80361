//! Numbers of bytes as text, in binary units.

/// Formats bytes in binary units, for example `1.5 MiB`.
pub fn human_bytes(bytes: usize) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut units = UNITS.iter().peekable();
    while value >= 1024.0 && units.next_if(|unit| **unit != "EiB").is_some() {
        value /= 1024.0;
    }
    format!("{value:.1} {}", units.peek().map_or("EiB", |unit| unit))
}

/// Formats bytes exactly, from 1 KiB on with binary units behind: `1536 bytes (1.5 KiB)`. Errors
/// need the exact number, because a limit of the rounded one may be too small.
pub fn exact_bytes(bytes: usize) -> String {
    let unit = if bytes == 1 { "byte" } else { "bytes" };
    if bytes < 1024 { format!("{bytes} {unit}") } else { format!("{bytes} {unit} ({})", human_bytes(bytes)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_largest_unit_that_leaves_one_or_more() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (3 << 19, "1.5 MiB"),
            (5 << 30, "5.0 GiB"),
            (3 << 40, "3.0 TiB"),
            (1 << 52, "4.0 PiB"),
            (usize::MAX, "16.0 EiB"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(human_bytes(bytes), expected);
        }
        assert_eq!(exact_bytes(1), "1 byte");
        assert_eq!(exact_bytes(300), "300 bytes");
        assert_eq!(exact_bytes(1536), "1536 bytes (1.5 KiB)");
    }
}
