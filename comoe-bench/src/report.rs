//! How results are shown: on which machine, on which day, in a table.

use std::time::SystemTime;

use candle_core::Device;

/// The processor and its threads, and the GPU where one is measured.
pub fn machine(device: &Device) -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|l| l.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let model = field("model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let threads = rayon::current_num_threads();
    let cpu = format!("{model}, {threads} compute threads");
    match gpu_name(device) {
        Some(gpu) => format!("{gpu}; {cpu}"),
        None => cpu,
    }
}

#[cfg(feature = "cuda")]
fn gpu_name(device: &Device) -> Option<String> {
    device.as_cuda_device().ok()?.cuda_stream().context().name().ok()
}

#[cfg(not(feature = "cuda"))]
fn gpu_name(_: &Device) -> Option<String> {
    None
}

/// Today in UTC, `2026-11-29`.
pub fn today() -> String {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    date(since.as_secs() / 86_400)
}

/// Days since 1970-01-01 as a date (Hinnant, "chrono-compatible low-level date algorithms").
fn date(days: u64) -> String {
    let z = days + 719_468;
    let (era, of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let day_of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + 400 * era + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

/// A table in Markdown whose columns also line up as plain text; the first column to the left, the rest to the right.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column heads.
    pub fn new(heads: &[&str]) -> Self {
        Self { rows: vec![heads.iter().map(|h| (*h).to_owned()).collect()] }
    }

    /// Appends a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| self.rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max();
        let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0).max(3)).collect();
        for (i, row) in self.rows.iter().enumerate() {
            f.write_str("|")?;
            for (c, width) in widths.iter().enumerate() {
                let cell = row.get(c).map_or("", String::as_str);
                if c == 0 { write!(f, " {cell:<width$} |")? } else { write!(f, " {cell:>width$} |")? }
            }
            writeln!(f)?;
            if i == 0 {
                f.write_str("|")?;
                for (c, width) in widths.iter().enumerate() {
                    let rule = "-".repeat(*width);
                    if c == 0 { write!(f, "-{rule}-|")? } else { write!(f, "-{rule}:|")? }
                }
                writeln!(f)?;
            }
        }
        Ok(())
    }
}

/// Memory of this process that no file backs, in bytes; `None` where it cannot be read.
pub fn rss_anon() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        for (days, want) in
            [(0, "1970-01-01"), (59, "1970-03-01"), (11_016, "2000-02-29"), (20_786, "2026-11-29")]
        {
            assert_eq!(date(days), want);
        }
    }

    #[test]
    fn tables_line_up() {
        let mut table = Table::new(&["slots", "tok/s"]);
        table.row(["all".to_owned(), "123.4".to_owned()]);
        assert_eq!(table.to_string(), "| slots | tok/s |\n|-------|------:|\n| all   | 123.4 |\n");
    }
}
