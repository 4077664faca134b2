//! `attn check` on the default device, and what it says when there is nothing to check.

use crate::attn::{error, json, stdout, usage};

#[test]
#[cfg(feature = "flex")]
fn the_grid_passes_and_says_how_close_it_came() {
    let check = json("check --device flex --dtype f32 --explain");
    assert_eq!(check["passed"], true);
    let [run] = check["runs"].as_array().unwrap().as_slice() else {
        panic!("one device, one element type: {check}");
    };
    assert_eq!(
        (&run["device"], &run["dtype"]),
        (&"flex".into(), &"f32".into())
    );
    let cases = run["cases"].as_u64().unwrap();
    assert!(cases > 100, "{cases}");
    assert_eq!(run["explained"].as_array().unwrap().len() as u64, cases);
    let served = run["explained"][0]["served_by"].as_str().unwrap();
    assert!(served.starts_with("forward composed"), "{served}");
    for output in ["o", "lse", "dq", "dk", "dv", "dbias"] {
        let closest = &run["closest"][output];
        let (error, bound) = (closest["error"].as_f64(), closest["bound"].as_f64());
        assert!(
            error.unwrap() > 0.0 && error <= bound,
            "{output}: {closest}"
        );
    }
}

/// Catches a count of cases that were not run and nobody knows why.
#[test]
#[cfg(feature = "flex")]
fn cases_that_are_left_out_are_explained() {
    let undefined = json("check --device flex --dtype f32")["runs"][0]["undefined"].clone();
    assert!(undefined.as_u64().unwrap() > 0);
    let text = stdout("check --device flex --dtype f32");
    let says = format!(
        " cases passed; {undefined} left out, which are made for other element types only\n"
    );
    assert!(text.contains(&says), "{text}");
    let help = stdout("check --help");
    let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains("the others leave them out, and say how many"),
        "{help}"
    );
}

#[test]
fn an_unknown_device_or_type_is_named() {
    assert!(error("check --device abacus").contains("device abacus is unknown"));
    assert!(usage("check --dtype f64").contains("'f64' for '--dtype <T>'"));
}
