//! The runtime links no compiler: this program, which links the runtime, is small.

use lighterage_runtime::{Machine, Options};
use object::read::elf::ElfFile64;
use object::{LittleEndian, Object as _, ObjectSegment as _};

#[test]
fn a_program_with_the_runtime_is_small() {
    // Uses every part, so that the linker keeps it.
    assert!(Machine::new(artifact::Artifact::default(), Options::default()).is_ok());
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    // The bytes that are loaded when it runs, without names and debugging information.
    let bytes: u64 = ElfFile64::<LittleEndian>::parse(&*program)
        .unwrap()
        .segments()
        .map(|s| s.file_range().1)
        .sum();
    assert!(bytes < 5 << 20, "{bytes} bytes");
}
