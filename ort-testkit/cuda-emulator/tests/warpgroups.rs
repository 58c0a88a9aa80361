//! Products of warpgroups, and the shared memory that they need, on a device of compute capability
//! 9.0.

#![allow(clippy::unwrap_used)]

use std::process::Command;

use half::{bf16, f16};

mod support;
use support::{Kernel, download, kernel_of, upload};

/// The variable that says what a process of a test does.
const CASE: &str = "WARPGROUPS_CASE";
/// The depth of the products, in four steps.
const DEPTH: usize = 64;

/// What a test says in a process of its own, for this case and this device, and whether it ended
/// well: a kernel that fails breaks the driver.
fn in_process(test: &str, case: &str, capability: &str) -> (String, bool) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CASE, case);
    let output = command.env("ORT_CUDA_EMULATOR_CAPABILITY", capability).output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(said.contains("running 1 test"), "{test}: {said}");
    (said, output.status.success())
}

/// The case of this process; where there is none, runs the test on a device of compute capability
/// 9.0.
fn case(test: &str) -> Option<String> {
    let case = std::env::var(CASE).ok();
    if case.is_none() {
        let (said, is_fine) = in_process(test, "", "9.0");
        assert!(is_fine, "{said}");
    }
    case
}

/// A kernel that fills shared memory and multiplies 64 rows by N columns.
fn product_text(element: &str, columns: usize, across: [bool; 2]) -> String {
    let registers: Vec<String> = (0..columns / 2).map(|at| format!("%f{at}")).collect();
    let registers = registers.join(", ");
    let stores: String =
        (0..columns / 2).map(|at| format!("st.global.f32 [%rd1+{}], %f{at};\n", 4 * at)).collect();
    let [turn_a, turn_b] = across.map(u8::from);
    format!(
        ".extern .shared .align 1024 .b8 memory[];
        .visible .entry product(.param .u64 image, .param .u32 bytes, .param .u64 a, .param .u64 b, .param .u64 step_a,
            .param .u64 step_b, .param .u64 out) {{
            .reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<{half}>;
            ld.param.u64 %rd1, [image]; ld.param.u32 %r1, [bytes];
            mov.u32 %r2, %tid.x; shl.b32 %r2, %r2, 2; mov.u32 %r3, memory;
        fill:
            setp.ge.u32 %p1, %r2, %r1; @%p1 bra filled;
            cvt.u64.u32 %rd2, %r2; add.s64 %rd3, %rd1, %rd2; ld.global.u32 %r4, [%rd3];
            add.s32 %r5, %r3, %r2; st.shared.u32 [%r5], %r4; add.s32 %r2, %r2, 512; bra fill;
        filled:
            fence.proxy.async.shared::cta;
            bar.sync 0;
            ld.param.u64 %rd4, [a]; ld.param.u64 %rd5, [b]; ld.param.u64 %rd6, [step_a]; ld.param.u64 %rd7, [step_b];
            cvt.u64.u32 %rd8, %r3; shr.u64 %rd8, %rd8, 4; add.s64 %rd4, %rd4, %rd8; add.s64 %rd5, %rd5, %rd8;
            mov.u32 %r6, 0;
            wgmma.fence.sync.aligned;
        more:
            {{ .reg .pred p; setp.ne.b32 p, %r6, 0;
            wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element}
                {{{registers}}}, %rd4, %rd5, p, 1, -1, {turn_a}, {turn_b}; }}
            wgmma.commit_group.sync.aligned;
            add.s64 %rd4, %rd4, %rd6; add.s64 %rd5, %rd5, %rd7;
            add.s32 %r6, %r6, 1; setp.lt.u32 %p3, %r6, 4; @%p3 bra more;
            wgmma.wait_group.sync.aligned 0;
            mov.u32 %r2, %tid.x; mul.lo.u32 %r2, %r2, {bytes}; cvt.u64.u32 %rd2, %r2;
            ld.param.u64 %rd1, [out]; add.s64 %rd1, %rd1, %rd2;
            {stores} ret; }}",
        half = columns / 2,
        bytes = columns * 2,
    )
}

/// A matrix in shared memory, mixed in patterns of 1024 bytes: lines of 128 bytes, whose chunks are
/// exchanged.
struct Side {
    bytes: Vec<u8>,
    /// What the descriptor has beside the address, and what it is moved by from step to step.
    descriptor: u64,
    step: u64,
}

/// The descriptor of 128-byte swizzling, for distances in bytes.
fn descriptor(leading: u64, stride: u64) -> u64 {
    1 << 62 | (stride >> 4) << 32 | (leading >> 4) << 16
}

impl Side {
    fn put(&mut self, line: usize, column: usize, value: u16) {
        let at = line * 128 + ((column / 8) ^ (line % 8)) * 16 + column % 8 * 2;
        self.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    /// Of `rows` rows: a line has all of the depth of a row, eight lines are a pattern.
    fn along(rows: usize, value: impl Fn(usize, usize) -> u16) -> Side {
        let mut side = Side { bytes: vec![0; rows * 128], descriptor: descriptor(16, 1024), step: 32 >> 4 };
        for row in 0..rows {
            (0..DEPTH).for_each(|k| side.put(row, k, value(row, k)));
        }
        side
    }

    /// A line has 64 rows at one place of the depth; the next 64 rows lie behind the whole depth of
    /// these.
    fn across(rows: usize, value: impl Fn(usize, usize) -> u16) -> Side {
        let panel = DEPTH as u64 * 128;
        let (bytes, descriptor) = (vec![0; rows.div_ceil(64) * DEPTH * 128], descriptor(panel, 1024));
        let mut side = Side { bytes, descriptor, step: (16 * 128) >> 4 };
        for row in 0..rows {
            (0..DEPTH).for_each(|k| side.put(row / 64 * DEPTH + k, row % 64, value(row, k)));
        }
        side
    }
}

fn number(row: usize, k: usize) -> f32 {
    ((row * 37 + k * 11 + row * k) % 23) as f32 / 8.0 - 1.0
}

/// Runs a product of this text; the code of the launch, and the sums of each thread.
fn run(text: &str, is_brain: bool, columns: usize, across: [bool; 2]) -> (u32, Vec<f32>) {
    let bits = |number: f32| {
        if is_brain { bf16::from_f32(number).to_bits() } else { f16::from_f32(number).to_bits() }
    };
    let side = |rows: usize, across: bool, from: usize| {
        let value = |row: usize, k: usize| bits(number(row + from, k));
        if across { Side::across(rows, value) } else { Side::along(rows, value) }
    };
    let (a, b) = (side(64, across[0], 0), side(columns, across[1], 100));
    let start = a.bytes.len() as u64 >> 4;
    let image = [a.bytes, b.bytes].concat();
    let kernel = kernel_of("sm_90a", text, "product").unwrap();
    let out = upload(&vec![0f32; 128 * columns / 2]);
    let [bytes, size] = [image.len(), image.len()];
    if size > 48 << 10 {
        assert_eq!(kernel.allow_shared(size as i32), 0);
    }
    let arguments = [upload(&image), bytes as u64, a.descriptor, b.descriptor + start, a.step, b.step, out];
    let code = kernel.launch(1, 128, size as u32, &arguments);
    (code, if code == 0 { download(out, 128 * columns / 2) } else { Vec::new() })
}

#[test]
fn matrices_in_shared_memory_are_multiplied() {
    if case("matrices_in_shared_memory_are_multiplied").is_none() {
        return;
    }
    for (element, columns, across) in [
        ("f16", 64, [false, false]),
        ("f16", 64, [false, true]),
        ("bf16", 128, [false, true]),
        ("f16", 256, [true, true]),
        ("bf16", 24, [true, false]),
    ] {
        let (code, sums) = run(&product_text(element, columns, across), element == "bf16", columns, across);
        assert_eq!(code, 0);
        for (at, sum) in sums.iter().enumerate() {
            let (thread, register) = (at / (columns / 2), at % (columns / 2));
            let row = thread / 32 * 16 + thread % 32 / 4 + register / 2 % 2 * 8;
            let column = register / 4 * 8 + thread % 4 * 2 + register % 2;
            // The second matrix is taken negative.
            let expected: f32 = (0..DEPTH).map(|k| -number(row, k) * number(column + 100, k)).sum();
            assert_eq!(*sum, expected, "{element} {columns} {across:?}: row {row}, column {column}");
        }
    }
}

#[test]
fn what_is_not_ordered_is_found() {
    const TEST: &str = "what_is_not_ordered_is_found";
    let text = product_text("f16", 64, [false, false]);
    let wait = "wgmma.wait_group.sync.aligned 0;";
    let cases = [
        ("fence.proxy.async.shared::cta;", String::new(), "without fence.proxy.async"),
        ("wgmma.fence.sync.aligned;", String::new(), "no wgmma.fence"),
        (wait, format!("bar.sync 0; st.shared.u32 [%r3], %r2; {wait}"), "written while it was read"),
    ];
    let Ok(case) = std::env::var(CASE) else {
        for (at, (what, _, why)) in cases.iter().enumerate() {
            let (said, is_fine) = in_process(TEST, &at.to_string(), "9.0");
            assert!(is_fine && said.contains(why), "{what}: {said}");
        }
        return;
    };
    let (what, instead, _) = &cases[case.parse::<usize>().unwrap()];
    assert!(text.contains(what));
    assert_eq!(run(&text.replace(what, instead), false, 64, [false; 2]).0, 719);
}

#[test]
fn sums_are_no_numbers_until_they_are_waited_for() {
    if case("sums_are_no_numbers_until_they_are_waited_for").is_none() {
        return;
    }
    let text = product_text("f16", 64, [false, false]);
    for left in ["4", "3", "1"] {
        let text = text.replace("wait_group.sync.aligned 0", &format!("wait_group.sync.aligned {left}"));
        let (code, sums) = run(&text, false, 64, [false; 2]);
        assert!(code == 0 && sums.iter().all(|sum| sum.is_nan()), "{left} groups left");
    }
}

#[test]
fn only_the_device_of_a_target_takes_it() {
    const TEST: &str = "only_the_device_of_a_target_takes_it";
    let load = |target| kernel_of(target, &product_text("f16", 64, [false, false]), "product").map(|_| ());
    match std::env::var(CASE).ok().as_deref() {
        None => ["8.0", "9.0", "10.0"].into_iter().for_each(|capability| {
            let (said, is_fine) = in_process(TEST, capability, capability);
            assert!(is_fine, "{capability}: {said}");
        }),
        Some("9.0") => assert_eq!([load("sm_90a"), load("sm_90")], [Ok(()), Err(218)]),
        Some(_) => assert_eq!(load("sm_90a"), Err(218)),
    }
}

#[test]
fn shared_memory_is_as_large_as_the_launch_says_and_was_allowed() {
    if case("shared_memory_is_as_large_as_the_launch_says_and_was_allowed").is_none() {
        return;
    }
    let text = ".extern .shared .align 1024 .b8 memory[];
        .visible .entry far(.param .u64 out, .param .u32 at) {
            .reg .b32 %r<9>; .reg .b64 %rd<9>; .shared .align 4 .b8 own[4];
            ld.param.u64 %rd1, [out]; ld.param.u32 %r1, [at]; mov.u32 %r2, memory; add.s32 %r3, %r2, %r1;
            mov.u32 %r4, own; st.shared.u32 [%r4], 7; st.shared.u32 [%r3], 42; ld.shared.u32 %r5, [%r3];
            ld.shared.u32 %r6, [%r4]; st.global.u32 [%rd1], %r5; st.global.u32 [%rd1+4], %r6;
            st.global.u32 [%rd1+8], %r2; ret; }";
    let kernel = || kernel_of("sm_90", text, "far").unwrap();
    let launch = |kernel: &Kernel, bytes: u32| {
        let out = upload(&[0u32; 3]);
        let code = kernel.launch(1, 1, bytes, &[out, u64::from(bytes) - 4]);
        (code, download::<u32>(out, 3))
    };
    let plain = kernel();
    assert_eq!(launch(&plain, 40 << 10), (0, vec![42, 7, 1024]));
    assert_eq!(launch(&plain, 48 << 10).0, 1, "with what the kernel declares it is more");
    assert_eq!(launch(&plain, 200 << 10).0, 1);
    assert_eq!(plain.allow_shared(200 << 10), 0);
    assert_eq!(launch(&plain, 200 << 10), (0, vec![42, 7, 1024]));
    assert_eq!(launch(&plain, (200 << 10) + 16).0, 1);
    assert_eq!(plain.allow_shared(227 << 10), 1, "with what the kernel declares it is more");
    assert_eq!(plain.allow_shared(228 << 10), 1);
    assert_eq!(plain.allow_shared(-1), 1);
}

#[test]
fn matrices_are_stored_as_they_are_loaded() {
    if case("matrices_are_stored_as_they_are_loaded").is_none() {
        return;
    }
    let text = ".visible .entry store(.param .u64 out) {
            .reg .b32 %r<20>; .reg .b64 %rd<9>; .shared .align 16 .b8 tile[1024];
            ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, tile;
            shl.b32 %r3, %r1, 4; add.s32 %r4, %r2, %r3;
            mul.lo.u32 %r5, %r1, 0x00020002; add.s32 %r5, %r5, 0x00010000;
            add.s32 %r6, %r5, 0x01000100; add.s32 %r7, %r6, 0x01000100; add.s32 %r8, %r7, 0x01000100;
            stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r4], {%r5, %r6, %r7, %r8};
            stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r4+512], {%r5, %r6, %r7, %r8};
            bar.warp.sync -1; cvt.u64.u32 %rd2, %r3; add.s64 %rd2, %rd1, %rd2;
            ld.shared.v4.u32 {%r9, %r10, %r11, %r12}, [%r4]; st.global.v4.u32 [%rd2], {%r9, %r10, %r11, %r12};
            ld.shared.v4.u32 {%r9, %r10, %r11, %r12}, [%r4+512]; st.global.v4.u32 [%rd2+512], {%r9, %r10, %r11, %r12};
            ret; }";
    let kernel = kernel_of("sm_90", text, "store").unwrap();
    let out = upload(&[0u16; 512]);
    kernel.run(1, 32, 0, &[out]);
    let found = download::<u16>(out, 512);
    for (at, value) in found.iter().enumerate() {
        let (matrix, row, column) = (at / 64 % 4, at / 8 % 8, at % 8);
        let place = if at < 256 { row * 8 + column } else { column * 8 + row };
        assert_eq!(usize::from(*value), 256 * matrix + place, "element {at}");
    }
}
