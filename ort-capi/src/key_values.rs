//! `OrtKeyValuePairs`: texts by text, with pointers that stay valid until the next change.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char};

use crate::entry::{In, InMut, Object, Out, Released, Text, entries, kinds};

/// Texts by text.
#[derive(Default)]
pub(crate) struct KeyValues {
    pairs: BTreeMap<CString, CString>,
    /// Pointers to the keys and to the values, in order, which C reads as arrays.
    keys: Vec<*const c_char>,
    values: Vec<*const c_char>,
}

// SAFETY: the pointers are those of `pairs`, which only `&mut self` changes.
unsafe impl Send for KeyValues {}
// SAFETY: as above.
unsafe impl Sync for KeyValues {}

kinds! {
    KeyValues => "OrtKeyValuePairs", b"OrtKeyVa";
}

impl KeyValues {
    pub(crate) const fn new() -> KeyValues {
        KeyValues { pairs: BTreeMap::new(), keys: Vec::new(), values: Vec::new() }
    }

    /// Sets a pair. An empty key is ignored, as in ONNX Runtime.
    pub(crate) fn set(&mut self, key: &[u8], value: &[u8]) {
        let (Ok(key), Ok(value)) = (CString::new(key), CString::new(value)) else { return };
        if !key.is_empty() {
            self.pairs.insert(key, value);
            self.index();
        }
    }

    fn remove(&mut self, key: &[u8]) {
        if let Ok(key) = CString::new(key) {
            self.pairs.remove(&key);
            self.index();
        }
    }

    fn get(&self, key: &[u8]) -> Option<&CString> {
        self.pairs.get(&CString::new(key).ok()?)
    }

    fn index(&mut self) {
        self.keys = self.pairs.keys().map(|key| key.as_ptr()).collect();
        self.values = self.pairs.values().map(|value| value.as_ptr()).collect();
    }
}

entries! {
    /// 295
    fn CreateKeyValuePairs(out: Out<*mut Object<KeyValues>>) -> (), else (), {
        if let Ok(out) = out.place() {
            out.put(Object::give(KeyValues::default()));
        }
    }

    /// 296
    fn AddKeyValuePair(pairs: InMut<KeyValues>, key: Text, value: Text) -> (), else (), {
        if let (Ok(pairs), Ok(key), Ok(value)) = (pairs.get(), key.bytes("the key"), value.bytes("the value")) {
            pairs.set(key, value);
        }
    }

    /// 297
    fn GetKeyValue(pairs: In<KeyValues>, key: Text) -> *const c_char, else std::ptr::null(), {
        match (pairs.get(), key.bytes("the key")) {
            (Ok(pairs), Ok(key)) => pairs.get(key).map_or(std::ptr::null(), |value| value.as_ptr()),
            _ => std::ptr::null(),
        }
    }

    /// 298
    fn GetKeyValuePairs(pairs: In<KeyValues>, keys: Out<*const *const c_char>, values: Out<*const *const c_char>, count: Out<usize>) -> (), else (), {
        if let (Ok(keys), Ok(values), Ok(count)) = (keys.place(), values.place(), count.place()) {
            let none = KeyValues::default();
            let pairs = pairs.get().unwrap_or(&none);
            keys.put(pairs.keys.as_ptr());
            values.put(pairs.values.as_ptr());
            count.put(pairs.keys.len());
        }
    }

    /// 299
    fn RemoveKeyValuePair(pairs: InMut<KeyValues>, key: Text) -> (), else (), {
        if let (Ok(pairs), Ok(key)) = (pairs.get(), key.bytes("the key")) {
            pairs.remove(key);
        }
    }

    /// 300
    fn ReleaseKeyValuePairs(pairs: Released<KeyValues>) -> (), else (), {
        pairs.release();
    }
}
