//! temp
use flash_attention_check::{Prepared, grid};
use flash_attention_spec::Dtype;
#[test]
fn stats() {
    let seeds: u64 = std::env::var("SEEDS")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(20);
    for report in flash_attention_tests::selected_devices() {
        for case in grid(false) {
            for &dtype in case.dtypes {
                if !report.dtypes.contains(&dtype) {
                    continue;
                }
                if dtype != Dtype::F32 && std::env::var("ALLD").is_err() {
                    continue;
                }
                let mut by: std::collections::BTreeMap<&str, Vec<f64>> = Default::default();
                for seed in 0..seeds {
                    let p = Prepared::new(&case, dtype, 1000 + seed).unwrap();
                    if let Ok(r) = p.run(&report.device) {
                        for v in &r.outputs {
                            let ratio = if v.worst == 0.0 {
                                0.0
                            } else {
                                v.worst / v.bound
                            };
                            by.entry(v.output).or_default().push(ratio);
                            let lim = if v.output == "o" { 5e-6 } else { 2e-5 };
                            if dtype == Dtype::F32
                                && v.output != "lse"
                                && v.frobenius >= lim
                                && !case.cancelling.contains(&v.output)
                            {
                                println!("FROB {} {dtype} seed {seed} {v}", case.name);
                            }
                        }
                    }
                }
                for (o, mut r) in by {
                    r.sort_by(f64::total_cmp);
                    let over = r.iter().filter(|x| **x > 1.0).count();
                    let med = r[r.len() / 2];
                    let max = r[r.len() - 1];
                    if max > 0.8 {
                        println!(
                            "{:6} {dtype} {:45} {o:5} median {med:.2} max {max:.2} over {over}/{}",
                            report.name,
                            case.name,
                            r.len()
                        );
                    }
                }
            }
        }
    }
}
