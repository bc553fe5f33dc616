//! Asks the linker to keep one of functions with equal code, which are 2 % of the command. Only
//! LLD knows the option; the compiler brings it along for this target since Rust 1.90.

use std::env::var;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let has_lld = var("TARGET").is_ok_and(|target| target == "x86_64-unknown-linux-gnu");
    if has_lld && var("PROFILE").is_ok_and(|profile| profile == "release") && minor() >= 90 {
        println!("cargo::rustc-link-arg-bins=-Wl,--icf=all");
    }
}

/// The compiler's version 1.N, as N; 0 if it cannot be read.
fn minor() -> u32 {
    let rustc = var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let Ok(output) = Command::new(rustc).arg("--version").output() else {
        return 0;
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let minor = text
        .strip_prefix("rustc 1.")
        .and_then(|rest| rest.split('.').next());
    minor.and_then(|minor| minor.parse().ok()).unwrap_or(0)
}
