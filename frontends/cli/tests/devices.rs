//! `lighterage devices`, with and without a GPU's driver.

use crate::common::{run, run_with};
use standin::{Options, Standin};

#[test]
fn machines_and_gpus_are_listed() {
    let standin = Standin::new(&Options::default()).unwrap();
    let driver = ("LIGHTERAGE_CUDA", standin.path().to_str().unwrap());
    let object = &run_with("devices --json", &[driver]).expect(0).json()[0];
    let gpu = &object["gpus"][0];
    assert_eq!((&gpu["number"], &gpu["sm"]), (&0.into(), &90.into()));
    assert!(gpu["bytes"].as_u64().unwrap() > 0);
    let known = object["known"].as_array().unwrap();
    assert!(known.iter().any(|device| device["name"] == "h100"));
    let text = run_with("devices", &[driver]).expect(0).out;
    assert!(text.contains("cuda:0") && text.contains("sm_90"), "{text}");
}

#[test]
fn without_a_driver_the_reason_is_told() {
    let missing = ("LIGHTERAGE_CUDA", "/nowhere/libcuda.so.1");
    let text = run_with("devices", &[missing]).expect(0).out;
    assert!(
        text.contains("none (") && text.contains("/nowhere"),
        "{text}"
    );
    assert!(
        run("devices --help")
            .expect(0)
            .out
            .contains("LIGHTERAGE_CUDA")
    );
}
