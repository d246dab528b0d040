//! Sizes as people type them: `900K`, `12G`, `1.5GiB`.

/// Reads a size in bytes. Units are binary, as memory is sold: K = 1024 bytes, M, G, T; `KB` and `KiB` mean the same.
///
/// # Errors
/// What is wrong with the text, for people to read.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let bad = || format!("{text:?} is no size: use a number with K, M, G or T, such as 900K or 12G");
    let text_lower = text.trim().to_ascii_lowercase();
    let split = text_lower.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text_lower.len());
    let (number, unit) = text_lower.split_at(split);
    let shift = match unit.trim_start() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(bad()),
    };
    let too_large = || format!("{text:?} is more bytes than a computer can count");
    if number.bytes().all(|b| b.is_ascii_digit()) && !number.is_empty() {
        // Digits that do not parse are too many.
        let whole: u64 = number.parse().map_err(|_| too_large())?;
        return whole.checked_mul(1 << shift).ok_or_else(too_large);
    }
    let number: f64 = number.parse().map_err(|_| bad())?;
    let bytes = number * (1u64 << shift) as f64;
    if bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(too_large()) }
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn sizes_are_read_as_people_type_them() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("900K", 900 << 10),
            ("12G", 12 << 30),
            ("12g", 12 << 30),
            ("1.5GiB", 3 << 29),
            ("2 MB", 2 << 20),
            (".5k", 512),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "G", "12X", "-1", "1e9", "1.2.3G", "K12", ".", "nan", "inf", "99999999999T", "1.0e3"]
        {
            let e = parse_size(text).unwrap_err();
            assert!(e.contains(text), "{e}");
        }
        assert!(parse_size("18446744073709551616").unwrap_err().contains("more bytes"));
        assert!(parse_size("20000000000.5G").unwrap_err().contains("more bytes"));
    }
}
