//! Every bad input gives an error that names the operand, what was given and what was expected,
//! and the panicking form panics with the same text.

use burn::tensor::{Bool, DType, Device, Tensor};
use burn_flash_attention::{
    AttentionError, AttentionOptions, MAX_ELEMENTS, MAX_HEAD_DIM, MAX_SEQUENCE, flash_attention,
    flash_attention_with_lse, try_flash_attention, try_flash_attention_with_lse,
};
use flash_attention_spec::{Dtype, ElementType, Operand, Operands, Options, Problem};
use flash_attention_tests::selected_devices;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// One call.
#[derive(Clone)]
struct Call {
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
}

impl Call {
    fn new(query: [usize; 4], key: [usize; 4], value: [usize; 4], device: &Device) -> Self {
        let zeros = |shape: [usize; 4]| Tensor::<4>::zeros(shape, (device, DType::F32));
        Self {
            query: zeros(query),
            key: zeros(key),
            value: zeros(value),
            options: AttentionOptions::new(),
        }
    }

    fn with(self, change: impl FnOnce(AttentionOptions) -> AttentionOptions) -> Self {
        Self {
            options: change(self.options),
            ..self
        }
    }

    fn operands(&self) -> (Tensor<4>, Tensor<4>, Tensor<4>) {
        (self.query.clone(), self.key.clone(), self.value.clone())
    }

    /// The text all four forms agree on.
    fn refusal(&self) -> String {
        let (query, key, value) = self.operands();
        let error =
            try_flash_attention(query, key, value, &self.options).expect_err("expected an error");
        let (query, key, value) = self.operands();
        let with_lse = try_flash_attention_with_lse(query, key, value, &self.options);
        let with_lse = with_lse.err().map(|error| error.to_string());
        assert_eq!(with_lse, Some(error.to_string()));
        let text = error.to_string();
        let (query, key, value) = self.operands();
        let panicked = panic_text(|| {
            flash_attention(query, key, value, &self.options);
        });
        assert_eq!(panicked, text);
        let (query, key, value) = self.operands();
        let panicked = panic_text(|| {
            flash_attention_with_lse(query, key, value, &self.options);
        });
        assert_eq!(panicked, text);
        text
    }
}

fn panic_text(call: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(call)).expect_err("expected a panic");
    *payload.downcast::<String>().expect("a formatted text")
}

/// A call that is right, to be made wrong in one place.
fn right(device: &Device) -> Call {
    Call::new([2, 4, 5, 8], [2, 2, 7, 8], [2, 2, 7, 6], device)
}

/// Catches a check that refuses what is right, which would make every test below pass.
#[test]
fn the_unchanged_call_is_accepted() {
    for report in selected_devices() {
        let (query, key, value) = right(&report.device).operands();
        let output = try_flash_attention(query, key, value, &AttentionOptions::new()).unwrap();
        assert_eq!(output.dims(), [2, 4, 5, 6]);
    }
}

/// Catches sizes that differ between operands and are read past their end.
#[test]
fn mismatched_sizes() {
    for report in selected_devices() {
        let refusal = |query, key, value| Call::new(query, key, value, &report.device).refusal();
        let (query, key, value) = ([2, 4, 5, 8], [2, 2, 7, 8], [2, 2, 7, 6]);
        assert_eq!(
            refusal(query, [3, 2, 7, 8], value),
            "key has batch 3, expected 2 as in query"
        );
        assert_eq!(
            refusal(query, key, [1, 2, 7, 6]),
            "value has batch 1, expected 2 as in query"
        );
        assert_eq!(
            refusal(query, [2, 2, 7, 9], value),
            "key has head_dim 9, expected 8 as in query"
        );
        assert_eq!(
            refusal(query, key, [2, 2, 6, 6]),
            "value has seq_kv 6, expected 7 as in key"
        );
        assert_eq!(
            refusal(query, key, [2, 4, 7, 6]),
            "value has heads 4, expected 2 as in key"
        );
        assert_eq!(
            refusal(query, [2, 3, 7, 8], [2, 3, 7, 6]),
            "query has 4 heads, expected a positive multiple of the 3 heads of key and value"
        );
        assert_eq!(
            refusal(query, [1, 3, 7, 8], [2, 3, 7, 6]),
            "key has batch 1, expected 2 as in query; \
             query has 4 heads, expected a positive multiple of the 3 heads of key and value"
        );
    }
}

/// Catches a head dim that no kernel has registers or shared memory for.
#[test]
fn head_dims_past_the_limit() {
    for report in selected_devices() {
        let refusal = |query, key, value| Call::new(query, key, value, &report.device).refusal();
        assert_eq!(
            refusal([1, 1, 2, 257], [1, 1, 3, 257], [1, 1, 3, 8]),
            "query has head_dim 257, expected 1 to 256"
        );
        assert_eq!(
            refusal([1, 1, 2, 8], [1, 1, 3, 8], [1, 1, 3, 300]),
            "value has value_dim 300, expected 1 to 256"
        );
        assert_eq!(
            refusal([1, 1, 2, 0], [1, 1, 3, 0], [1, 1, 3, 8]),
            "query has head_dim 0, expected 1 to 256"
        );
    }
}

/// Catches a mask or bias that is stretched over sizes it does not have.
#[test]
fn masks_and_biases_that_do_not_broadcast() {
    for report in selected_devices() {
        let device = &report.device;
        let mask = |shape: [usize; 4]| {
            let mask = Tensor::<4, Bool>::full(shape, false, device);
            right(device).with(|options| options.mask(mask)).refusal()
        };
        let bias = |shape: [usize; 4]| {
            let bias = Tensor::<4>::zeros(shape, (device, DType::F32));
            right(device).with(|options| options.bias(bias)).refusal()
        };
        assert_eq!(
            mask([2, 4, 5, 8]),
            "mask has shape [2, 4, 5, 8], expected [2, 4, 5, 7] with any dimension 1"
        );
        assert_eq!(
            mask([2, 2, 5, 7]),
            "mask has shape [2, 2, 5, 7], expected [2, 4, 5, 7] with any dimension 1"
        );
        assert_eq!(
            bias([2, 4, 7, 5]),
            "bias has shape [2, 4, 7, 5], expected [2, 4, 5, 7] with any dimension 1"
        );
        assert_eq!(
            bias([3, 1, 1, 1]),
            "bias has shape [3, 1, 1, 1], expected [2, 4, 5, 7] with any dimension 1"
        );
    }
}

/// Catches a cap or scale that turns every score into NaN.
#[test]
fn caps_and_scales_out_of_range() {
    for report in selected_devices() {
        let refusal = |change: fn(AttentionOptions) -> AttentionOptions| {
            right(&report.device).with(change).refusal()
        };
        assert_eq!(
            refusal(|options| options.softcap(0.0)),
            "softcap is 0.0, expected a positive number from 1.18e-38 to 3.40e38"
        );
        assert_eq!(
            refusal(|options| options.softcap(-3.0)),
            "softcap is -3.0, expected a positive number from 1.18e-38 to 3.40e38"
        );
        assert_eq!(
            refusal(|options| options.softcap(f64::NAN)),
            "softcap is NaN, expected a positive number from 1.18e-38 to 3.40e38"
        );
        assert_eq!(
            refusal(|options| options.softcap(f64::INFINITY)),
            "softcap is inf, expected a positive number from 1.18e-38 to 3.40e38"
        );
        assert_eq!(
            refusal(|options| options.scale(f64::NAN)),
            "scale is NaN, expected a finite number of at most 3.40e38 in size"
        );
        assert_eq!(
            refusal(|options| options.scale(f64::NEG_INFINITY)),
            "scale is -inf, expected a finite number of at most 3.40e38 in size"
        );
        assert_eq!(
            refusal(|options| options.scale(f64::NAN).softcap(0.0)),
            "scale is NaN, expected a finite number of at most 3.40e38 in size; \
             softcap is 0.0, expected a positive number from 1.18e-38 to 3.40e38"
        );
    }
}

/// Catches operands of unequal types, which would be read with the wrong width.
#[test]
fn unequal_element_types() {
    let mut pairs = 0;
    for report in selected_devices() {
        for &dtype in report.dtypes.iter().filter(|&&dtype| dtype != Dtype::F32) {
            pairs += 1;
            let burn_dtype = burn_flash_attention::burn_dtype(dtype);
            let call = right(&report.device);
            let key = Call {
                key: call.key.clone().cast(burn_dtype),
                ..call.clone()
            };
            assert_eq!(
                key.refusal(),
                format!("key has element type {dtype}, expected f32 as in query")
            );
            let value = Call {
                value: call.value.clone().cast(burn_dtype),
                ..call.clone()
            };
            assert_eq!(
                value.refusal(),
                format!("value has element type {dtype}, expected f32 as in query")
            );
            let bias = Tensor::<4>::zeros([1, 1, 1, 7], (&report.device, burn_dtype));
            assert_eq!(
                call.with(|options| options.bias(bias)).refusal(),
                format!("bias has element type {dtype}, expected f32 as in query")
            );
        }
    }
    // Some software devices have f32 alone.
    let only_f32 = |report: &burn_flash_attention::DeviceReport| report.dtypes == [Dtype::F32];
    assert!(pairs > 0 || selected_devices().iter().all(only_f32));
}

/// Catches a type that attention is not defined on and that Burn does have.
#[cfg(feature = "flex")]
#[test]
fn element_types_attention_is_not_defined_on() {
    let call = right(&Device::flex());
    let wide = Call {
        query: call.query.clone().cast(DType::F64),
        ..call
    };
    assert_eq!(
        wide.refusal(),
        "query has element type f64, expected f32, f16 or bf16"
    );
}

/// Catches operands that the tensor types of Burn rule out and other callers can pass: ranks other
/// than 4, integers, masks that are not bool.
#[test]
fn ranks_and_integers() {
    let float = |shape: &[usize]| Operand::new(shape, Dtype::F32);
    let operands = Operands::new(
        float(&[2, 4, 5, 8]),
        float(&[2, 2, 7, 8]),
        float(&[2, 2, 7, 6]),
    );
    let refusal = |operands: Operands| {
        let error = Problem::new(&operands, &Options::default()).unwrap_err();
        AttentionError::from(error).to_string()
    };
    let other = |name: &str| ElementType::Other(name.into());
    assert_eq!(
        refusal(Operands {
            query: float(&[4, 5, 8]),
            ..operands.clone()
        }),
        "query has shape [4, 5, 8] with 3 dimensions, expected 4"
    );
    assert_eq!(
        refusal(Operands {
            mask: Some(Operand::new([5, 7], ElementType::Bool)),
            ..operands.clone()
        }),
        "mask has shape [5, 7] with 2 dimensions, expected 4"
    );
    assert_eq!(
        refusal(Operands {
            key: Operand::new([2, 2, 7, 8], other("i32")),
            ..operands.clone()
        }),
        "key has element type i32, expected f32, f16 or bf16"
    );
    assert_eq!(
        refusal(Operands {
            mask: Some(float(&[1, 1, 5, 7])),
            ..operands
        }),
        "mask has element type f32, expected bool"
    );
}

/// Catches limits of the errors' texts that users cannot name, and an overflow that a 0 hides.
#[test]
fn shapes_past_what_can_be_addressed() {
    let float = |shape: [usize; 4]| Operand::new(shape, Dtype::F32);
    let [query, key] = [[0, 1 << 62, 5, 8], [0, 1 << 62, 7, 8]].map(float);
    let operands = Operands::new(query, key.clone(), key);
    let error = Problem::new(&operands, &Options::new()).unwrap_err();
    let text = AttentionError::from(error).to_string();
    let first = format!(
        "query has shape [0, {}, 5, 8], expected a product of at most {} over the dimensions",
        1_usize << 62,
        MAX_ELEMENTS
    );
    assert!(text.starts_with(&first), "{text}");
    let limits = [MAX_HEAD_DIM, MAX_SEQUENCE, MAX_ELEMENTS];
    assert!(limits.is_sorted(), "{limits:?}");
}

/// Catches a device that is given an element type it cannot compute with, and returns garbage.
#[test]
fn element_types_the_device_lacks() {
    for report in selected_devices() {
        let missing = Dtype::ALL
            .iter()
            .filter(|dtype| !report.dtypes.contains(dtype));
        for &dtype in missing {
            let zeros = |shape: [usize; 4]| {
                let values = vec![0.0; shape.iter().product()];
                flash_attention_check::layout::float_tensor(&values, shape, dtype, &report.device)
            };
            let call = Call {
                query: zeros([1, 1, 2, 8]),
                key: zeros([1, 1, 3, 8]),
                value: zeros([1, 1, 3, 8]),
                options: AttentionOptions::new(),
            };
            let has: Vec<String> = report.dtypes.iter().map(Dtype::to_string).collect();
            assert_eq!(
                call.refusal(),
                format!(
                    "query has element type {dtype}, expected one that device {:?} computes with: {}",
                    report.device,
                    has.join(", ")
                )
            );
        }
    }
}

/// Catches operands on two devices; needs two to run on.
#[test]
fn two_devices() {
    let devices = selected_devices();
    for pair in devices.windows(2) {
        let (here, there) = (&pair[0].device, &pair[1].device);
        let at = format!("is on device {there:?}, expected {here:?} as for query");
        let call = right(here);
        let key = Call {
            key: right(there).key,
            ..call.clone()
        };
        assert_eq!(key.refusal(), format!("key {at}"));
        let value = Call {
            value: right(there).value,
            ..call.clone()
        };
        assert_eq!(value.refusal(), format!("value {at}"));
        let mask = Tensor::<4, Bool>::full([1, 1, 5, 7], false, there);
        let mask = call.clone().with(|options| options.mask(mask));
        assert_eq!(mask.refusal(), format!("mask {at}"));
        let bias = Tensor::<4>::zeros([1, 1, 5, 7], (there, DType::F32));
        let bias = call.with(|options| options.bias(bias));
        assert_eq!(bias.refusal(), format!("bias {at}"));
    }
}

/// Catches a mix of checkpointing strategies that only Burn's panic tells of; a device without
/// autodiff has no strategy.
#[test]
fn two_checkpointing_strategies() {
    for report in selected_devices() {
        let kept = report.device.clone().autodiff();
        let balanced = kept.clone().gradient_checkpointing();
        let text = |operand: &str, other: &str| {
            format!(
                "{operand} is on a device of gradient checkpointing Balanced, expected Disabled \
                 as for {other}"
            )
        };
        let call = right(&kept);
        let key = Call {
            key: right(&balanced).key,
            ..call.clone()
        };
        assert_eq!(key.refusal(), text("key", "query"));
        let value = Call {
            query: right(&report.device).query,
            value: right(&balanced).value,
            ..call.clone()
        };
        assert_eq!(value.refusal(), text("value", "key"));
        let mask = Tensor::<4, Bool>::full([1, 1, 5, 7], false, &balanced);
        let mask = call.clone().with(|options| options.mask(mask));
        assert_eq!(mask.refusal(), text("mask", "query"));
        let bias = Tensor::<4>::zeros([1, 1, 5, 7], (&balanced, DType::F32));
        let bias = call.with(|options| options.bias(bias));
        assert_eq!(bias.refusal(), text("bias", "query"));

        let mut mixed = right(&balanced);
        mixed.query = right(&report.device).query;
        let (query, key, value) = mixed.operands();
        assert!(try_flash_attention(query, key, value, &mixed.options).is_ok());
    }
}
