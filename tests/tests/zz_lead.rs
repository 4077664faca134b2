//! temp
use flash_attention_check::{Prepared, grid};
use flash_attention_spec::Dtype;
#[test]
fn one_by_one() {
    let only = std::env::var("ONLY").unwrap_or_default();
    let skip: usize = std::env::var("SKIP")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(0);
    for report in flash_attention_tests::selected_devices() {
        let g = grid(std::env::var("FULL").is_ok());
        eprintln!("{} cases on {} {:?}", g.len(), report.name, report.dtypes);
        for (n, case) in g.iter().enumerate().skip(skip) {
            if !case.name.contains(&only) {
                continue;
            }
            for &dtype in case.dtypes {
                if !report.dtypes.contains(&dtype) {
                    continue;
                }
                if dtype != Dtype::F32 && std::env::var("ALLD").is_err() {
                    continue;
                }
                let t0 = std::time::Instant::now();
                let p = match Prepared::new(case, dtype, 1) {
                    Ok(p) => p,
                    Err(e) => {
                        eprintln!("{n} {} PREP {e}", case.name);
                        continue;
                    }
                };
                let t1 = std::time::Instant::now();
                let r = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    p.run(&report.device)
                }));
                let t2 = std::time::Instant::now();
                let s = match r {
                    Ok(Ok(r)) => {
                        if r.passed {
                            "ok".to_string()
                        } else {
                            format!("FAIL {r}")
                        }
                    }
                    Ok(Err(e)) => format!("ERR {e}"),
                    Err(_) => "PANIC".into(),
                };
                eprintln!(
                    "{n} {} {dtype} ref {:.2} run {:.2} {}",
                    case.name,
                    (t1 - t0).as_secs_f64(),
                    (t2 - t1).as_secs_f64(),
                    s
                );
            }
        }
    }
}
