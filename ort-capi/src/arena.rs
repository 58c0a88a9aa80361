//! `OrtArenaCfg` and `OrtThreadingOptions`.

use std::ffi::c_void;

use ort_runtime::{ArenaConfig, SessionOptions};

use crate::custom_threads::{CreateFn, JoinFn, PoolSizes, ThreadFunctions};
use crate::entry::{Array, InMut, Object, Out, Released, Text, entries, kinds};
use crate::session_options::threads;
use crate::status::{Outcome, invalid};

/// How an arena grows.
pub(crate) struct Arena(pub(crate) ArenaConfig);

/// Settings of the pools of the environment. All sessions of a process share one pool, so that the
/// sizes only count for the functions of a client.
#[derive(Clone, Copy)]
pub(crate) struct ThreadingOptions {
    pub(crate) sizes: PoolSizes,
    pub(crate) functions: ThreadFunctions,
}

kinds! {
    Arena => "OrtArenaCfg", b"OrtArena";
    ThreadingOptions => "OrtThreadingOptions", b"OrtThrea";
}

/// Keys of arenas that only CUDA reads.
const CUDA_KEYS: [&str; 3] =
    ["use_cuda_mempool", "cuda_mempool_release_threshold", "cuda_mempool_bytes_to_keep_on_shrink"];

/// Reads settings; -1 stands for the default.
fn arena_of<'a>(settings: impl IntoIterator<Item = (&'a str, i64)>) -> Outcome<Arena> {
    let mut options = SessionOptions::default();
    for (key, value) in settings {
        if CUDA_KEYS.contains(&key) {
            continue;
        }
        if !SessionOptions::arena_keys().any(|known| known == key) {
            let keys: Vec<_> = SessionOptions::arena_keys().collect();
            return invalid(format!("Invalid key found: {key}; the keys are {}", keys.join(", ")));
        }
        // 0 bytes stand for no limit, as in ONNX Runtime.
        let value = if key == "max_mem" { value.max(0) } else { value };
        options.add_session_config_entry(key, &value.to_string())?;
    }
    Ok(Arena(options.arena))
}

entries! {
    /// 156
    fn CreateArenaCfg(max_mem: usize, strategy: i32, initial_chunk: i32, max_dead: i32, out: Out<*mut Object<Arena>>) {
        let out = out.place()?;
        out.put(Object::give(arena_of([
            // The largest number stands for no limit.
            ("max_mem", i64::try_from(max_mem).unwrap_or(0)),
            ("arena_extend_strategy", strategy.into()),
            ("initial_chunk_size_bytes", initial_chunk.into()),
            ("max_dead_bytes_per_chunk", max_dead.into()),
        ])?));
        Ok(())
    }

    /// 164
    fn CreateArenaCfgV2(keys: Array<Text>, values: Array<usize>, count: usize, out: Out<*mut Object<Arena>>) {
        let out = out.place()?;
        let keys = keys.get(count, "the array of keys")?;
        let values = values.get(count, "the array of values")?;
        let mut settings = Vec::with_capacity(count);
        for (key, value) in keys.iter().zip(values) {
            // Callers pass -1 as the largest number.
            settings.push((key.get("a key")?, i64::try_from(*value).unwrap_or(-1)));
        }
        out.put(Object::give(arena_of(settings)?));
        Ok(())
    }

    /// 157
    fn ReleaseArenaCfg(arena: Released<Arena>) -> (), else (), {
        arena.release();
    }

    /// 121
    fn CreateThreadingOptions(out: Out<*mut Object<ThreadingOptions>>) {
        out.place()?.put(Object::give(ThreadingOptions {
            sizes: PoolSizes { intra: 0, inter: 0 },
            functions: ThreadFunctions::default(),
        }));
        Ok(())
    }

    /// 122
    fn ReleaseThreadingOptions(options: Released<ThreadingOptions>) -> (), else (), {
        options.release();
    }

    /// 147
    fn SetGlobalIntraOpNumThreads(options: InMut<ThreadingOptions>, number: i32) {
        options.get()?.sizes.intra = threads(number);
        Ok(())
    }

    /// 148
    fn SetGlobalInterOpNumThreads(options: InMut<ThreadingOptions>, number: i32) {
        options.get()?.sizes.inter = threads(number);
        Ok(())
    }

    /// 149
    fn SetGlobalSpinControl(options: InMut<ThreadingOptions>, spins: i32) {
        options.get()?;
        match spins {
            0 | 1 => Ok(()),
            _ => invalid(format!("Received invalid value for allow_spinning. Valid values are 0 or 1, got {spins}")),
        }
    }

    /// 227. The pool chooses its processors itself.
    fn SetGlobalIntraOpThreadAffinity(options: InMut<ThreadingOptions>, affinity: Text) {
        options.get()?;
        if affinity.is_null() {
            return invalid("Received null affinity_string");
        }
        match affinity.bytes("the affinities")?.len() {
            1..=4096 => Ok(()),
            len => invalid(format!("Size of affinity string must be between 1 and 4096, got {len}")),
        }
    }

    /// 199
    fn SetGlobalCustomCreateThreadFn(options: InMut<ThreadingOptions>, create: Option<CreateFn>) {
        options.get()?.functions.create = create;
        Ok(())
    }

    /// 200
    fn SetGlobalCustomThreadCreationOptions(options: InMut<ThreadingOptions>, settings: *mut c_void) {
        options.get()?.functions.settings = settings;
        Ok(())
    }

    /// 201
    fn SetGlobalCustomJoinThreadFn(options: InMut<ThreadingOptions>, join: Option<JoinFn>) {
        options.get()?.functions.join = join;
        Ok(())
    }

    /// 155
    fn SetGlobalDenormalAsZero(options: InMut<ThreadingOptions>) {
        options.get().map(drop)
    }
}
