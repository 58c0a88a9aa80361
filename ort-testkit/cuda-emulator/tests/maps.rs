//! Copies by tensor maps and the barriers that their bytes arrive at, on a device of compute
//! capability 9.0.

#![allow(clippy::unwrap_used)]

use std::process::Command;

use ort_cuda_emulator::driver::cuTensorMapEncodeTiled;

mod support;
use support::{download, kernel_of, ready, upload};

/// The variable that says what a process of a test does.
const CASE: &str = "MAPS_CASE";
/// Elements of the tensor: the nearest first.
const SIZES: [u64; 3] = [72, 5, 2];
/// Its bytes from line to line, and from matrix to matrix.
const STEPS: [u64; 2] = [160, 1024];
/// The box: 64 elements of four lines.
const BOX: [u32; 3] = [64, 4, 1];
const BOX_BYTES: usize = 64 * 4 * 2;

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

/// What a map is encoded from.
#[derive(Clone)]
struct Given {
    element: u32,
    address: u64,
    sizes: Vec<u64>,
    steps: Vec<u64>,
    boxes: Vec<u32>,
    element_step: u32,
    swizzle: u32,
}

/// A place for a map.
#[repr(align(64))]
struct Place([u64; 17]);

impl Given {
    /// Halves, swizzled by 128 bytes.
    fn new(address: u64) -> Given {
        let (sizes, steps, boxes) = (SIZES.to_vec(), STEPS.to_vec(), BOX.to_vec());
        Given { element: 6, address, sizes, steps, boxes, element_step: 1, swizzle: 3 }
    }

    /// The map, written this number of words beyond a multiple of 64 bytes; or the code of the
    /// error.
    fn encode_at(&self, word: usize) -> Result<[u64; 16], u32> {
        ready();
        let mut place = Place([0; 17]);
        let element_steps = vec![self.element_step; self.sizes.len()];
        // SAFETY: there are as many numbers as axes, and room for a map.
        let code = unsafe {
            cuTensorMapEncodeTiled(
                place.0.as_mut_ptr().add(word).cast(),
                self.element,
                self.sizes.len() as u32,
                self.address as *mut _,
                self.sizes.as_ptr(),
                self.steps.as_ptr(),
                self.boxes.as_ptr(),
                element_steps.as_ptr(),
                0,
                self.swizzle,
                2,
                0,
            )
        };
        if code == 0 { Ok(place.0[word..word + 16].try_into().unwrap()) } else { Err(code) }
    }

    fn encode(&self) -> Result<[u64; 16], u32> {
        self.encode_at(0)
    }
}

/// A kernel whose first thread asks for a box; all wait for it, and write what is there.
const TEXT: &str = ".visible .entry copy(.param .u64 map, .param .u32 x, .param .u32 y, .param .u32 z, .param .u64 out) {
        .reg .pred %p<4>; .reg .b32 %r<12>; .reg .b64 %rd<9>;
        .shared .align 1024 .b8 tile[1024]; .shared .align 8 .b8 barrier[8];
        ld.param.u64 %rd1, [map]; ld.param.u32 %r1, [x]; ld.param.u32 %r2, [y]; ld.param.u32 %r3, [z]; ld.param.u64 %rd2, [out];
        mov.u32 %r4, %tid.x; mov.u32 %r5, tile; mov.u32 %r6, barrier; setp.ne.u32 %p1, %r4, 0;
        @%p1 bra begin;
        mbarrier.init.shared::cta.b64 [%r6], 1;
        fence.mbarrier_init.release.cluster;
    begin:
        bar.sync 0;
        @%p1 bra more;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 512;
        cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%rd1, {%r1, %r2, %r3}], [%r6];
    more:
        mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r6], 0;
        @!%p2 bra more;
        shl.b32 %r7, %r4, 4; add.s32 %r8, %r5, %r7; cvt.u64.u32 %rd3, %r7; add.s64 %rd4, %rd2, %rd3;
        ld.shared.v4.u32 {%r8, %r9, %r10, %r11}, [%r8]; st.global.v4.u32 [%rd4], {%r8, %r9, %r10, %r11};
        ret; }";

fn tensor() -> Vec<u16> {
    (0..1024).collect()
}

/// A map of the tensor.
fn given() -> Given {
    ready();
    Given::new(upload(&tensor()))
}

/// The code of a launch of this text, and what it wrote.
fn run(text: &str, given: &Given, at: [i32; 3]) -> (u32, Vec<u16>) {
    let kernel = kernel_of("sm_90", text, "copy").unwrap();
    let (map, out) = (upload(&given.encode().unwrap()), upload(&[0xAAAAu16; BOX_BYTES / 2]));
    let [x, y, z] = at.map(|place| u64::from(place as u32));
    let code = kernel.launch(1, BOX_BYTES as u32 / 16, 0, &[map, x, y, z, out]);
    (code, if code == 0 { download(out, BOX_BYTES / 2) } else { Vec::new() })
}

#[test]
fn boxes_are_copied_swizzled_with_zeros_beyond_the_ends() {
    const TEST: &str = "boxes_are_copied_swizzled_with_zeros_beyond_the_ends";
    if std::env::var(CASE).is_err() {
        let (said, is_fine) = in_process(TEST, "", "9.0");
        return assert!(is_fine, "{said}");
    }
    let tensor = tensor();
    let given = given();
    for at in [[0, 0, 0], [8, 1, 1], [64, 0, 1], [4, 3, 0], [-8, -2, 0], [0, 0, 2], [72, 0, 0]] {
        let (code, found) = run(TEXT, &given, at);
        assert_eq!(code, 0, "{at:?}");
        for (place, value) in found.iter().enumerate() {
            let (line, chunk) = (place / 64, (place / 8 % 8) ^ (place / 64 % 8));
            let own = [at[0] + (chunk * 8 + place % 8) as i32, at[1] + line as i32, at[2]];
            let is_there = own.iter().zip(SIZES).all(|(own, size)| (0..size as i32).contains(own));
            let [x, y, z] = own.map(|own| own as usize);
            let expected = if is_there { tensor[z * 512 + y * 80 + x] } else { 0 };
            assert_eq!(*value, expected, "{at:?}: element {place}");
        }
    }
    let plain = Given { swizzle: 0, ..given };
    let (code, found) = run(TEXT, &plain, [0; 3]);
    assert_eq!((code, &found[64..72]), (0, &tensor[80..88]));
}

#[test]
fn only_maps_that_the_hardware_takes_are_encoded() {
    const TEST: &str = "only_maps_that_the_hardware_takes_are_encoded";
    let Ok(case) = std::env::var(CASE) else {
        for capability in ["8.0", "9.0"] {
            let (said, is_fine) = in_process(TEST, capability, capability);
            assert!(is_fine, "{said}");
        }
        return;
    };
    let given = given();
    let address = given.address;
    if case == "8.0" {
        assert_eq!(given.encode(), Err(801));
        assert_eq!(kernel_of("sm_80", TEXT, "copy").map(|_| ()), Err(218));
        return;
    }
    assert!(given.encode().is_ok());
    assert_eq!(kernel_of("sm_80", TEXT, "copy").map(|_| ()), Err(218));
    assert_eq!(given.encode_at(1), Err(1), "a place at no multiple of 64 bytes");
    let wrong = [
        Given { address: address + 8, ..given.clone() },
        Given { address: 0, ..given.clone() },
        Given { sizes: vec![0, 5, 2], ..given.clone() },
        Given { steps: vec![168, 1024], ..given.clone() },
        Given { steps: vec![160, 1 << 40], ..given.clone() },
        Given { boxes: vec![72, 4, 1], ..given.clone() },
        Given { boxes: vec![4, 4, 1], ..given.clone() },
        Given { boxes: vec![64, 257, 1], ..given.clone() },
        Given { element_step: 0, ..given.clone() },
        Given { element: 13, ..given.clone() },
        Given { swizzle: 2, ..given.clone() },
        Given { sizes: Vec::new(), ..given.clone() },
    ];
    for (at, wrong) in wrong.iter().enumerate() {
        assert_eq!(wrong.encode(), Err(1), "case {at}");
    }
}

#[test]
fn misuse_of_barriers_and_copies_is_found() {
    const TEST: &str = "misuse_of_barriers_and_copies_is_found";
    let init = "mbarrier.init.shared::cta.b64 [%r6], 1;";
    let expect = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 512;";
    let cases = [
        (init, String::new(), "a barrier that no mbarrier.init made"),
        (init, init.replace(", 1", ", 0"), "a barrier of no arrivals"),
        (init, format!("{init} st.shared.u32 [%r6], %r4;"), "a barrier that was written over"),
        (init, init.replace("%r6", "%r6+4"), "misaligned"),
        (expect, format!("{expect} {expect}"), "more arrivals than the barrier counts"),
        (expect, expect.replace("512", "528"), "a deadlock (Phase"),
        (
            expect,
            "mbarrier.arrive.shared::cta.b64 _, [%r6];".to_owned(),
            "more arrivals than the barrier counts",
        ),
        ("[%r5], [%rd1", "[%r5+64], [%rd1".to_owned(), "a copy to no multiple of 128 bytes"),
        ("[%r5], [%rd1", "[%r5+640], [%rd1".to_owned(), "memory that is not allocated"),
        ("ld.param.u64 %rd1, [map]", "ld.param.u64 %rd1, [out]".to_owned(), "no tensor map"),
        (
            "mov.u32 %r4, %tid.x;",
            "mov.u32 %r4, %tid.x; add.s64 %rd1, %rd1, 8;".to_owned(),
            "no multiple of 64 bytes",
        ),
        (", [%r6], 0;", ", [%r6], 2;".to_owned(), "a parity that is not 0 or 1"),
        ("more:", "more: ret;".to_owned(), "the block ends before copies"),
    ];
    let Ok(case) = std::env::var(CASE) else {
        for (at, (what, _, why)) in cases.iter().enumerate() {
            let (said, is_fine) = in_process(TEST, &at.to_string(), "9.0");
            assert!(is_fine && said.contains(why), "case {at}, {what}: {said}");
        }
        return;
    };
    let (what, instead, _) = &cases[case.parse::<usize>().unwrap()];
    assert!(TEXT.contains(what));
    let text = match *what {
        // The arrival without bytes opens the barrier before they come, and the next one is one too
        // many.
        _ if instead.starts_with("mbarrier.arrive.shared") => {
            TEXT.replace(what, &format!("{instead} {expect} {expect}"))
        }
        _ => TEXT.replace(what, instead),
    };
    let given = given();
    assert!([716, 719, 700].contains(&run(&text, &given, [0; 3]).0));
}

#[test]
fn who_does_not_wait_reads_what_was_there_before() {
    const TEST: &str = "who_does_not_wait_reads_what_was_there_before";
    if std::env::var(CASE).is_err() {
        let (said, is_fine) = in_process(TEST, "", "9.0");
        return assert!(is_fine, "{said}");
    }
    let text = TEXT.replace("@!%p2 bra more;", "");
    let (code, found) = run(&text, &given(), [0; 3]);
    // The turn of the thread that asked ends with its wait in vain, those of the others with
    // theirs: then the bytes are there.
    assert_eq!(code, 0);
    let text = text.replace("mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r6], 0;", "");
    let ended = text.replace(
        "ret; }",
        "last: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r6], 0; @!%p2 bra last; ret; }",
    );
    let (code, unread) = run(&ended, &given(), [0; 3]);
    assert!(code == 0 && unread.iter().all(|value| *value == 0xFFFF) && unread != found);
}
