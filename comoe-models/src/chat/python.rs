//! How Python prints values and dates, since chat templates were written for it.

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};

/// Most bytes that a value is printed as. A list that holds a list twice, which holds another twice, is short in a
/// template and endless in print.
pub(super) const MOST_BYTES: usize = 32 << 20;
/// Most lists and objects within each other that are printed.
pub(super) const MOST_DEPTH: usize = 100;

/// A value that would be printed beyond those bounds.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLarge;

impl std::fmt::Display for TooLarge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "a value is too large to be printed ({MOST_BYTES} bytes and a depth of {MOST_DEPTH} are the limits)"
        )
    }
}

/// `str(value)`: what `{{ value }}` prints. What is not defined prints nothing.
pub(super) fn text(value: &Value) -> Result<String, TooLarge> {
    let mut out = String::new();
    match value.as_str() {
        Some(text) => out.push_str(text),
        None if value.is_undefined() => {}
        None => repr(value, &mut out, 0)?,
    }
    Ok(out)
}

/// `repr(value)`: texts in quotes, and lists and objects of such.
fn repr(value: &Value, out: &mut String, depth: usize) -> Result<(), TooLarge> {
    if depth > MOST_DEPTH {
        return Err(TooLarge);
    }
    let items = |open: char, close: char, out: &mut String| {
        out.push(open);
        for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
            if i > 0 {
                out.push_str(", ");
            }
            repr(&item, out, depth + 1)?;
            if value.kind() == ValueKind::Map {
                out.push_str(": ");
                repr(&value.get_item(&item).unwrap_or_default(), out, depth + 1)?;
            }
            if out.len() > MOST_BYTES {
                return Err(TooLarge);
            }
        }
        out.push(close);
        Ok(())
    };
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.push_str(&float(number)),
            Err(_) => out.push_str(&value.to_string()),
        },
        ValueKind::String => quoted(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => return items('[', ']', out),
        ValueKind::Map => return items('{', '}', out),
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// `repr` of a float: the shortest digits, with an exponent below 1e-4 and from 1e16 on.
fn float(number: f64) -> String {
    if !number.is_finite() {
        return format!("{number}").to_ascii_lowercase();
    }
    let size = number.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{number:?}")
}

fn quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_ascii_control() => {
                // Writing to a string cannot fail.
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Formats seconds since 1970 (UTC) by the `strftime` letters that do not depend on a place; others are left as they
/// are. `-` before a letter leaves out leading zeros.
pub(super) fn strftime(seconds: u64, format: &str) -> String {
    let days = seconds / 86_400;
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    // 1970-01-01 was a Thursday.
    let weekday = (days + 4) % 7;
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[weekday as usize]);
    let year_day = days - days_before(year) + 1;
    let hour_of_12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let bare = chars.next_if_eq(&'-').is_some();
        let number = |value: u64, width: usize| match bare {
            true => value.to_string(),
            false => format!("{value:0width$}"),
        };
        let part = match chars.peek() {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('e') if bare => day.to_string(),
            Some('e') => format!("{day:2}"),
            Some('j') => number(year_day, 3),
            Some('H') => number(hour, 2),
            Some('I') => number(hour_of_12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('f') => "000000".to_owned(),
            Some('w') => weekday.to_string(),
            Some('u') => ((weekday + 6) % 7 + 1).to_string(),
            Some('s') => seconds.to_string(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('D') => format!("{month:02}/{day:02}/{:02}", year % 100),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('R') => format!("{hour:02}:{minute:02}"),
            Some('Z') => String::new(),
            Some('z') => String::new(),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('%') => "%".to_owned(),
            _ => {
                out.push_str(if bare { "%-" } else { "%" });
                continue;
            }
        };
        chars.next();
        out.push_str(&part);
    }
    out
}

/// Year, month and day of a day since 1970-01-01 (H. Hinnant, "chrono-compatible low-level date algorithms").
fn civil(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let era = z / 146_097;
    let doe = z % 146_097;
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + u64::from(month <= 2), month, doy - (153 * mp + 2) / 5 + 1)
}

/// Days from 1970-01-01 to the first of January of `year`.
fn days_before(year: u64) -> u64 {
    let y = year - 1;
    y * 365 + y / 4 - y / 100 + y / 400 - 719_162
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_print_as_in_python() {
        let of = |json: &str| text(&serde_json::from_str::<Value>(json).unwrap()).unwrap();
        assert_eq!(
            of(r#"{"b": [true, null, 1, 1.0, "x"], "a": {}}"#),
            "{'b': [True, None, 1, 1.0, 'x'], 'a': {}}"
        );
        assert_eq!(of(r#""as it's""#), "as it's");
        assert_eq!(
            of(r#"["it's", "say \"x\"", "both ' and \"", "a\nb\\\u0001"]"#),
            r#"["it's", 'say "x"', 'both \' and "', 'a\nb\\\x01']"#
        );
        assert_eq!(text(&Value::UNDEFINED).unwrap(), "");
        for (number, printed) in [
            (1e16, "1e+16"),
            (1.5e-7, "1.5e-07"),
            (123456.789, "123456.789"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e300, "1e+300"),
        ] {
            assert_eq!(text(&Value::from(number)).unwrap(), printed);
        }
    }

    #[test]
    fn dates() {
        assert_eq!(strftime(0, "%d %b %Y %H:%M:%S %A %q %%"), "01 Jan 1970 00:00:00 Thursday %q %");
        assert_eq!(
            strftime(951_826_153, "%a %Y-%m-%d %H:%M:%S %B %y"),
            "Tue 2000-02-29 12:09:13 February 00"
        );
        assert_eq!(strftime(4_107_542_399, "%Y-%m-%d"), "2100-02-28");
        assert_eq!(strftime(4_107_542_400, "%Y-%m-%d"), "2100-03-01");
        assert_eq!(
            strftime(951_826_153, "%j %I %p %-m/%-d %e %u %w %F %T %-Q %"),
            "060 12 PM 2/29 29 2 2 2000-02-29 12:09:13 %-Q %"
        );
        assert_eq!(strftime(0, "%I %p %j %-j %e"), "12 AM 001 1  1");
        // The last day of a leap year, and the first of the next.
        assert_eq!(strftime(978_220_800, "%j"), "366");
        assert_eq!(strftime(978_307_200, "%j"), "001");
    }
}
