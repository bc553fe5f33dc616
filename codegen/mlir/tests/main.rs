//! Starts the program and sends it requests, as the compiler does. Cargo builds the program for
//! this test, so that the tests of other crates find it too.

use std::io::Write;
use std::process::{Command, Output, Stdio};

/// What the program answers to its whole input.
fn answer(input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_lighterage-mlir"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program should start");
    let mut to = child.stdin.take().expect("it should have an input");
    to.write_all(input.as_bytes())
        .expect("it should read its input");
    drop(to);
    child.wait_with_output().expect("it should end")
}

fn request(name: &str, module: &str) -> String {
    let triple = "nvptx64-nvidia-cuda";
    format!(
        "{name} asm {triple} sm_90 +ptx80 {}\n{module}",
        module.len()
    )
}

/// The words `ok` or `error` of all answers, with what follows each.
fn parts(output: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut parts = vec![];
    let mut rest = output;
    while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
        let line = std::str::from_utf8(&rest[..end]).expect("a line should be text");
        let (word, n) = line.split_once(' ').expect("a line should have two words");
        let n: usize = n.parse().expect("the second should be a number");
        parts.push((word.into(), rest[end + 1..end + 1 + n].to_vec()));
        rest = &rest[end + 1 + n..];
    }
    parts
}

#[test]
fn a_refused_module_does_not_end_the_program() {
    let good = request("good", "module {\n}\n");
    let bad = request("bad", "module {\n  what is this\n}\n");
    let output = answer(&[&*good, &*bad, &*good].concat());
    assert!(output.status.success());
    let parts = parts(&output.stdout);
    let words: Vec<&str> = parts.iter().map(|(word, _)| &**word).collect();
    assert_eq!(words, ["ok", "error", "ok"]);
    assert!(String::from_utf8_lossy(&parts[0].1).contains(".target sm_90"));
    assert!(String::from_utf8_lossy(&parts[1].1).starts_with("bad: "));
    assert_eq!(parts[0], parts[2]);
}

#[test]
fn a_line_that_is_no_request_ends_the_program_with_an_error() {
    for line in [
        "good asm\n",
        "good exe nvptx64-nvidia-cuda sm_90 - 0\n",
        "good asm nvptx64-nvidia-cuda sm_90 - many\n",
    ] {
        let output = answer(line);
        assert!(!output.status.success(), "{line}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("in the request"), "{line}: {said}");
    }
}
