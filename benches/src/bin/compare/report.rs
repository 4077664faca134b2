//! The figures as a table, as JSON and as CSV.

use crate::agreement::Agreement;
use crate::measure::Measurement;
use crate::setting::Setting;
use crate::workload::{Implementation, Workload};
use serde_json::{Map, Value, json};
use std::fmt::{self, Write};

/// One workload by every implementation asked for.
pub struct Comparison {
    pub workload: Workload,
    pub results: Vec<(Implementation, Figures)>,
    /// Where both implementations ran.
    pub agreement: Option<Agreement>,
}

/// A [`Measurement`] in the numbers that are reported; times in seconds.
#[derive(Clone, Copy)]
pub struct Figures {
    first: f64,
    median: f64,
    least: f64,
    most: f64,
    issue: f64,
    start_bytes: Option<u64>,
    peak_bytes: Option<u64>,
}

impl Figures {
    pub fn of(measurement: &Measurement) -> Self {
        let total = sorted(&measurement.total);
        Self {
            first: measurement.first,
            median: median(&total),
            least: total[0],
            most: total[total.len() - 1],
            issue: median(&sorted(&measurement.issue)),
            start_bytes: measurement.start_bytes,
            peak_bytes: measurement.peak_bytes,
        }
    }

    /// Thousand million floating-point operations a second.
    fn rate(&self, workload: &Workload) -> f64 {
        workload.operations() / self.median / 1e9
    }

    fn json(&self, by: Implementation, workload: &Workload) -> Value {
        json!({
            "by": by,
            "first_s": self.first,
            "median_s": self.median,
            "min_s": self.least,
            "max_s": self.most,
            "issue_s": self.issue,
            "gflops": self.rate(workload),
            "start_bytes": self.start_bytes,
            "peak_bytes": self.peak_bytes,
        })
    }
}

fn sorted(times: &[f64]) -> Vec<f64> {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times
}

/// Of sorted times, of which there is one at least.
fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        0 => (sorted[middle - 1] + sorted[middle]) / 2.0,
        _ => sorted[middle],
    }
}

/// How many times as much Burn's attention takes; of each implementation the first result counts.
struct Ratios {
    first: f64,
    median: f64,
    issue: f64,
    peak: Option<f64>,
}

impl Ratios {
    fn of(comparison: &Comparison) -> Option<Self> {
        let figures = |who| {
            let mut results = comparison.results.iter();
            results
                .find(|(by, _)| *by == who)
                .map(|(_, figures)| figures)
        };
        let (flash, burn) = (
            figures(Implementation::Flash)?,
            figures(Implementation::Burn)?,
        );
        let peak = burn.peak_bytes.zip(flash.peak_bytes);
        Some(Self {
            first: burn.first / flash.first,
            median: burn.median / flash.median,
            issue: burn.issue / flash.issue,
            peak: peak.map(|(burn, flash)| burn as f64 / flash as f64),
        })
    }
}

/// Lines over the table that say what its columns mean.
pub fn heading(setting: &Setting, workload: &Workload, samples: usize, sets: usize) -> String {
    let Workload {
        batch,
        heads,
        kv_heads,
        head_dim,
        dtype,
        causal,
        ..
    } = workload;
    let causal = if *causal { "causal" } else { "not causal" };
    let columns = [
        "seq", "pass", "by", "first", "median", "min", "max", "issue", "GFLOP/s", "start", "peak",
    ];
    format!(
        "{setting}\
         # shape: batch {batch}, heads {heads}, kv heads {kv_heads}, head dim {head_dim}, {dtype}, {causal}\n\
         # samples: {samples}, over {sets} sets of inputs, one process for each line; times in ms, host memory in MiB\n\
         # first: with compilation and tuning; issue: until the device has been handed all work;\n\
         # start: resident before the first call; peak: most resident\n\
         {}\n",
        line(columns.map(String::from))
    )
}

fn line(cells: [String; 11]) -> String {
    const WIDTHS: [usize; 11] = [7, 8, 10, 11, 11, 11, 11, 11, 9, 9, 9];
    let padded = WIDTHS.iter().zip(cells);
    let text: Vec<String> = padded
        .map(|(width, cell)| format!("{cell:>width$}"))
        .collect();
    text.join(" ").trim_end().to_string()
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = |seconds: f64| format!("{:.3}", seconds * 1e3);
        let mebibytes = |bytes: Option<u64>| {
            bytes.map_or("-".to_string(), |bytes| {
                format!("{:.1}", bytes as f64 / f64::from(1 << 20))
            })
        };
        let times = |ratio: f64| format!("{ratio:.2}x");
        let (seq, pass) = (
            self.workload.seq.to_string(),
            self.workload.pass.to_string(),
        );
        for (by, figures) in &self.results {
            let cells = [
                seq.clone(),
                pass.clone(),
                by.to_string(),
                milliseconds(figures.first),
                milliseconds(figures.median),
                milliseconds(figures.least),
                milliseconds(figures.most),
                milliseconds(figures.issue),
                format!("{:.2}", figures.rate(&self.workload)),
                mebibytes(figures.start_bytes),
                mebibytes(figures.peak_bytes),
            ];
            writeln!(f, "{}", line(cells))?;
        }
        if let Some(ratios) = Ratios::of(self) {
            let none = String::new;
            let cells = [
                seq,
                pass,
                "burn/flash".to_string(),
                times(ratios.first),
                times(ratios.median),
                none(),
                none(),
                times(ratios.issue),
                none(),
                none(),
                ratios.peak.map_or("-".to_string(), times),
            ];
            writeln!(f, "{}", line(cells))?;
        }
        if let Some(Agreement { differences, bound }) = &self.agreement {
            let each: Vec<String> = differences
                .iter()
                .map(|(name, difference)| format!("{name} {difference:.1e}"))
                .collect();
            let each = each.join(", ");
            writeln!(
                f,
                "# flash differs from burn by {each} (at most {bound:.0e})"
            )?;
        }
        Ok(())
    }
}

impl Comparison {
    /// The workload, the figures, and what they say of each other.
    pub fn json(&self) -> Value {
        let results = self.results.iter();
        let results = results.map(|(by, figures)| figures.json(*by, &self.workload));
        let ratios = Ratios::of(self).map(|ratios| {
            json!({
                "first": ratios.first,
                "median": ratios.median,
                "issue": ratios.issue,
                "peak_bytes": ratios.peak,
            })
        });
        let agreement = self.agreement.as_ref().map(|agreement| {
            let differences = agreement.differences.iter();
            let differences = differences.map(|(name, by)| (name.to_string(), json!(by)));
            json!({ "differences": differences.collect::<Map<_, _>>(), "bound": agreement.bound })
        });
        json!({
            "workload": self.workload,
            "results": results.collect::<Vec<_>>(),
            "burn_over_flash": ratios,
            "agreement": agreement,
        })
    }

    /// A line for each implementation, under [`CSV_HEADER`].
    pub fn csv(&self, setting: &Setting) -> String {
        let mut text = String::new();
        for (by, figures) in &self.results {
            let Workload {
                batch,
                heads,
                kv_heads,
                seq,
                head_dim,
                dtype,
                causal,
                pass,
            } = &self.workload;
            let Figures {
                first,
                median,
                least,
                most,
                issue,
                ..
            } = figures;
            let commit = setting.commit.as_deref().unwrap_or_default();
            let texts = [&setting.device, &setting.hardware, &setting.build, commit].map(quoted);
            let bytes = |bytes: Option<u64>| bytes.map(|n| n.to_string()).unwrap_or_default();
            let (start, peak) = (bytes(figures.start_bytes), bytes(figures.peak_bytes));
            let rate = figures.rate(&self.workload);
            let _ = writeln!(
                text,
                "{},{batch},{heads},{kv_heads},{seq},{head_dim},{dtype},{causal},{pass},{by},\
                 {first},{median},{least},{most},{issue},{rate},{start},{peak}",
                texts.join(",")
            );
        }
        text
    }
}

/// Titles of the columns of [`Comparison::csv`].
pub const CSV_HEADER: &str = "device,hardware,build,commit,batch,heads,kv_heads,seq,head_dim,dtype,causal,pass,by,\
first_s,median_s,min_s,max_s,issue_s,gflops,start_bytes,peak_bytes";

/// A text as one CSV field (RFC 4180).
fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::tests::workload;
    use crate::workload::{Element, Pass};

    fn figures(total: &[f64], peak_bytes: u64) -> Figures {
        Figures::of(&Measurement {
            first: 9.0,
            total: total.to_vec(),
            issue: vec![0.5],
            start_bytes: None,
            peak_bytes: Some(peak_bytes),
        })
    }

    #[test]
    fn the_median_is_the_middle_or_the_mean_of_the_two() {
        assert_eq!(figures(&[3.0, 1.0, 2.0, 10.0, 9.0], 1).median, 3.0);
        let even = figures(&[4.0, 1.0, 2.0, 10.0], 1);
        assert_eq!((even.median, even.least, even.most), (3.0, 1.0, 10.0));
    }

    #[test]
    fn ratios_are_burn_over_flash_in_any_order() {
        let both = [
            (Implementation::Burn, figures(&[6.0], 8 << 20)),
            (Implementation::Flash, figures(&[2.0], 2 << 20)),
        ];
        for results in [both.to_vec(), both.into_iter().rev().collect()] {
            let comparison = Comparison {
                workload: workload(Pass::Forward, Element::F32),
                results,
                agreement: None,
            };
            let ratios = Ratios::of(&comparison).unwrap();
            assert_eq!((ratios.median, ratios.peak), (3.0, Some(4.0)));
            let text = comparison.to_string();
            let last = text.lines().last().unwrap();
            let words: Vec<&str> = last.split_whitespace().collect();
            let expected = [
                "3",
                "forward",
                "burn/flash",
                "1.00x",
                "3.00x",
                "1.00x",
                "4.00x",
            ];
            assert_eq!(words, expected);
        }
        let alone = Comparison {
            workload: workload(Pass::Forward, Element::F32),
            results: vec![both[0]],
            agreement: None,
        };
        assert!(Ratios::of(&alone).is_none());
    }

    #[test]
    fn a_csv_line_has_a_field_for_each_title() {
        let setting = Setting {
            command: "compare".to_string(),
            commit: None,
            build: "dev".to_string(),
            device: "flex".to_string(),
            hardware: "a \"b\" c".to_string(),
            compiler: "rust",
            host: "host".to_string(),
        };
        let comparison = Comparison {
            workload: workload(Pass::Training, Element::Bf16),
            results: vec![(Implementation::Flash, figures(&[2.0], 5))],
            agreement: None,
        };
        let text = comparison.csv(&setting);
        assert_eq!(text.lines().count(), 1);
        let fields: Vec<&str> = text.trim_end().split(',').collect();
        assert_eq!(fields.len(), CSV_HEADER.split(',').count());
        assert_eq!(fields[..4], ["flex", "\"a \"\"b\"\" c\"", "dev", ""]);
        let named: Vec<_> = CSV_HEADER.split(',').zip(fields).collect();
        assert!(named.contains(&("median_s", "2")));
        assert!(named.contains(&("dtype", "bf16")));
        assert!(named.contains(&("start_bytes", "")));
        assert!(named.contains(&("peak_bytes", "5")));
    }
}
