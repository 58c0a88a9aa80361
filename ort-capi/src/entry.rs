//! The border of the library: arguments of C functions as types with checked access, and functions
//! that no panic leaves.
//!
//! Each argument type has the representation of the C type. A value of it comes from a C caller,
//! who promises what the header of ONNX Runtime demands: a pointer is null, or points to what its
//! type says, for as long as the header says. The accessors rely on this promise and check the
//! rest: null, alignment, and the tag of a handle.

use std::any::Any;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ort_sys::{OrtStatusPtr, os_char};

use crate::status::{Failure, Outcome, code, fail};

/// Defines C functions as constants that are function pointers, for the table. A function without a
/// return type returns a status; the body of one ends in `Ok(())` or fails with a [`Failure`].
///
/// The other functions have no status to tell a failure by, so a panic gives the value behind
/// `else`.
macro_rules! entries {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $ty:ty),* $(,)?) $(-> $ret:ty, else $other:expr,)? $body:block)*) => {
        $($crate::entry::entries!(@one [$(#[$attribute])*] $name ($($argument: $ty),*) [$($ret, $other)?] $body);)*
    };
    (@one [$(#[$attribute:meta])*] $name:ident ($($argument:ident: $ty:ty),*) [] $body:block) => {
        $(#[$attribute])*
        pub(crate) const $name: extern "system" fn($($ty),*) -> ort_sys::OrtStatusPtr = {
            #[allow(unused_mut, reason = "some bodies borrow an argument mutably")]
            extern "system" fn entry($(mut $argument: $ty),*) -> ort_sys::OrtStatusPtr {
                $crate::entry::guarded(stringify!($name), move || $body)
            }
            entry
        };
    };
    (@one [$(#[$attribute:meta])*] $name:ident ($($argument:ident: $ty:ty),*) [$ret:ty, $other:expr] $body:block) => {
        $(#[$attribute])*
        pub(crate) const $name: extern "system" fn($($ty),*) -> $ret = {
            #[allow(unused_mut, reason = "some bodies borrow an argument mutably")]
            extern "system" fn entry($(mut $argument: $ty),*) -> $ret {
                $crate::entry::guarded_value(move || $body, $other)
            }
            entry
        };
    };
}
pub(crate) use entries;

/// Calls the body of a C function, and turns a failure or a panic into a status.
pub(crate) fn guarded(name: &str, body: impl FnOnce() -> Outcome) -> OrtStatusPtr {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => OrtStatusPtr::default(),
        Ok(Err(failure)) => failure.into_status(),
        Err(payload) => {
            let text = format!("{name} panicked: {}; this is a bug of ort-runtime", text_of(&*payload));
            Failure::new(code::RUNTIME_EXCEPTION, text).into_status()
        }
    }
}

/// Calls the body of a C function without a status. A panic gives `other`.
pub(crate) fn guarded_value<T>(body: impl FnOnce() -> T, other: T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(other)
}

fn text_of(payload: &(dyn Any + Send)) -> &str {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (_, Some(text)) => text,
        _ => "no message",
    }
}

/// What a handle of C points to.
pub(crate) trait Kind {
    /// The type's name in the header.
    const NAME: &'static str;
    /// A number that the memory of handles of other types does not begin with.
    const TAG: u64;
}

macro_rules! kinds {
    ($($ty:ty => $name:literal, $tag:literal;)*) => {
        $(impl $crate::entry::Kind for $ty {
            const NAME: &'static str = $name;
            const TAG: u64 = u64::from_le_bytes(*$tag);
        })*
    };
}
pub(crate) use kinds;

/// An object that C holds a pointer to.
#[repr(C)]
pub(crate) struct Object<T> {
    /// [`Kind::TAG`], or 0 once the object is released.
    tag: AtomicU64,
    /// Whether another object owns this one: C may read it, and neither release nor give it away.
    is_owned: AtomicBool,
    pub(crate) inner: T,
}

impl<T: Kind> Object<T> {
    pub(crate) const fn new(inner: T) -> Object<T> {
        Object { tag: AtomicU64::new(T::TAG), is_owned: AtomicBool::new(false), inner }
    }

    /// Moves a value to memory that C owns from now on.
    pub(crate) fn give(inner: T) -> *mut Object<T> {
        Box::into_raw(Box::new(Object::new(inner)))
    }
}

impl<T: Kind + Clone> Clone for Object<T> {
    fn clone(&self) -> Object<T> {
        Object::new(self.inner.clone())
    }
}

fn checked<T: Kind>(pointer: *const Object<T>) -> Result<(), Failure> {
    if pointer.is_null() {
        return fail(code::INVALID_ARGUMENT, format!("the pointer to {} is null", T::NAME));
    }
    if !pointer.is_aligned() {
        return fail(code::INVALID_ARGUMENT, format!("the pointer is not that of an {}", T::NAME));
    }
    // SAFETY: the caller passes a pointer to an object of this library, whose memory begins with
    // its tag. The read does not assume which one.
    let tag = unsafe { &*pointer.cast::<AtomicU64>() }.load(Ordering::Relaxed);
    match tag == T::TAG {
        true => Ok(()),
        false => fail(
            code::INVALID_ARGUMENT,
            format!("the pointer is not that of an {}, or the object was released", T::NAME),
        ),
    }
}

/// A handle that a function reads.
#[repr(transparent)]
pub(crate) struct In<T>(*const Object<T>);

impl<T> Clone for In<T> {
    fn clone(&self) -> In<T> {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T> In<T> {
    /// A handle to an object that C keeps alive.
    pub(crate) fn of(object: *const Object<T>) -> In<T> {
        In(object)
    }
}

impl<T: Kind> In<T> {
    /// The object.
    pub(crate) fn get(&self) -> Result<&T, Failure> {
        checked(self.0)?;
        // SAFETY: the tag is that of `T`, which `give` wrote, and the caller releases the object
        // only after the call.
        Ok(unsafe { &(*self.0).inner })
    }

    /// The object, or `None` for null.
    pub(crate) fn optional(&self) -> Result<Option<&T>, Failure> {
        if self.0.is_null() { Ok(None) } else { self.get().map(Some) }
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn address(&self) -> *const Object<T> {
        self.0
    }
}

/// A handle that a function changes. The header allows one caller at a time.
#[repr(transparent)]
pub(crate) struct InMut<T>(*mut Object<T>);

impl<T> InMut<T> {
    /// The pointer, for functions of the client.
    pub(crate) fn pointer(&self) -> *mut Object<T> {
        self.0
    }
}

impl<T: Kind> InMut<T> {
    pub(crate) fn address(&self) -> *const Object<T> {
        self.0
    }

    /// The object.
    pub(crate) fn get(&mut self) -> Result<&mut T, Failure> {
        checked(self.0)?;
        // SAFETY: as in `In::get`; the caller lets no other thread use the object meanwhile.
        Ok(unsafe { &mut (*self.0).inner })
    }
}

/// A handle that a function releases or takes over; null is allowed.
#[repr(transparent)]
pub(crate) struct Released<T>(*mut Object<T>);

impl<T: Kind> Released<T> {
    /// An object that a function of the caller gives.
    pub(crate) fn of(object: *mut Object<T>) -> Released<T> {
        Released(object)
    }

    /// The object, to check it before it is released or taken.
    pub(crate) fn get(&self) -> Result<&T, Failure> {
        checked(self.0)?;
        // SAFETY: as in `In::get`.
        Ok(unsafe { &(*self.0).inner })
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn address(&self) -> *const Object<T> {
        self.0
    }

    /// Whether another object owns this one.
    pub(crate) fn is_owned(&self) -> bool {
        // SAFETY: as in `In::get`.
        checked(self.0).is_ok() && unsafe { &(*self.0).is_owned }.load(Ordering::Acquire)
    }

    /// Takes the object over. C keeps the pointer, which stays valid for as long as the owner.
    pub(crate) fn take(&mut self) -> Result<Owned<T>, Failure> {
        checked(self.0)?;
        // SAFETY: as in `In::get`.
        if unsafe { &(*self.0).is_owned }.swap(true, Ordering::AcqRel) {
            return fail(
                code::INVALID_ARGUMENT,
                format!("the {} belongs to another object already", T::NAME),
            );
        }
        Ok(Owned(std::mem::replace(&mut self.0, std::ptr::null_mut())))
    }

    pub(crate) fn is(&self, object: *const Object<T>) -> bool {
        self.0.cast_const() == object
    }

    /// Drops the object. What is none, was released before, or belongs to another object is left
    /// alone: there is no status to say so.
    pub(crate) fn release(self) {
        if checked(self.0).is_ok() && !self.is_owned() {
            // SAFETY: the tag is that of `T`, so `give` made it; the caller gives it back once.
            let object = unsafe { Box::from_raw(self.0) };
            object.tag.store(0, Ordering::Relaxed);
        }
    }
}

/// An object that another one owns while C may hold its pointer.
pub(crate) struct Owned<T>(*mut Object<T>);

// SAFETY: it owns the object as a box does; the handles of C promise what the header demands.
unsafe impl<T: Send> Send for Owned<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Owned<T> {}

impl<T: Kind> Owned<T> {
    pub(crate) fn new(inner: T) -> Owned<T> {
        let object = Object { is_owned: AtomicBool::new(true), ..Object::new(inner) };
        Owned(Box::into_raw(Box::new(object)))
    }

    pub(crate) fn address(&self) -> *const Object<T> {
        self.0
    }
}

impl<T> std::ops::Deref for Owned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `give` made the object, which lives until this is dropped.
        unsafe { &(*self.0).inner }
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: as in `deref`; only the owner frees it.
        let object = unsafe { Box::from_raw(self.0) };
        object.tag.store(0, Ordering::Relaxed);
    }
}

/// Where a function writes a result.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// A place that a function of a table gets.
    pub(crate) fn of(place: *mut T) -> Out<T> {
        Out(place)
    }

    /// Checks that there is a place, before any work.
    pub(crate) fn place(&mut self) -> Result<Place<'_, T>, Failure> {
        if self.0.is_null() {
            return fail(code::INVALID_ARGUMENT, "the pointer for the result is null".to_owned());
        }
        Ok(Place(self))
    }
}

/// A place for a result.
pub(crate) struct Place<'a, T>(&'a mut Out<T>);

impl<T> Place<'_, T> {
    pub(crate) fn put(self, value: T) {
        // SAFETY: `place` checked for null; the caller gives memory for a `T`, of any content.
        unsafe { self.0.0.write_unaligned(value) }
    }

    /// Reads what the caller wrote there.
    pub(crate) fn read(&self) -> T
    where
        T: Copy,
    {
        // SAFETY: as in `put`; functions that read a size first demand that it is initialised.
        unsafe { self.0.0.read_unaligned() }
    }
}

/// A text of C, which ends with a zero.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// A text of a caller.
    pub(crate) fn of(text: *const c_char) -> Text {
        Text(text)
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// The bytes without the zero.
    pub(crate) fn bytes(&self, what: &str) -> Result<&[u8], Failure> {
        if self.0.is_null() {
            return fail(code::INVALID_ARGUMENT, format!("{what} is null"));
        }
        // SAFETY: it is not null, and the caller passes a text that ends with a zero.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }

    /// The text, which has to be UTF-8.
    pub(crate) fn get(&self, what: &str) -> Result<&str, Failure> {
        let bytes = self.bytes(what)?;
        let not_utf8 = |_| {
            let shown = String::from_utf8_lossy(bytes).into_owned();
            Failure::new(code::INVALID_ARGUMENT, format!("{what} is not UTF-8: '{shown}'"))
        };
        std::str::from_utf8(bytes).map_err(not_utf8)
    }

    /// The text, or an empty one for null.
    pub(crate) fn or_empty(&self, what: &str) -> Result<&str, Failure> {
        if self.0.is_null() { Ok("") } else { self.get(what) }
    }
}

/// A path of C: bytes on Unix, UTF-16 on Windows.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct PathText(*const os_char);

impl PathText {
    #[cfg(unix)]
    pub(crate) fn get(&self, what: &str) -> Result<PathBuf, Failure> {
        use std::os::unix::ffi::OsStrExt;
        let text = Text(self.0);
        Ok(PathBuf::from(std::ffi::OsStr::from_bytes(text.bytes(what)?)))
    }

    #[cfg(windows)]
    pub(crate) fn get(&self, what: &str) -> Result<PathBuf, Failure> {
        use std::os::windows::ffi::OsStringExt;
        if self.0.is_null() {
            return fail(code::INVALID_ARGUMENT, format!("{what} is null"));
        }
        // SAFETY: it is not null, and the caller passes a text that ends with a zero.
        let len = (0..).take_while(|&at| unsafe { *self.0.add(at) } != 0).count();
        // SAFETY: the units before the zero were read above.
        let units = unsafe { std::slice::from_raw_parts(self.0, len) };
        Ok(PathBuf::from(std::ffi::OsString::from_wide(units)))
    }
}

/// An array that a function reads.
#[repr(transparent)]
pub(crate) struct Array<T>(*const T);

impl<T> Array<T> {
    /// An array of a caller.
    pub(crate) fn of(elements: *const T) -> Array<T> {
        Array(elements)
    }

    /// The elements. Null stands for none.
    pub(crate) fn get(&self, len: usize, what: &str) -> Result<&[T], Failure> {
        check_array(self.0, len, what)?;
        if len == 0 {
            return Ok(&[]);
        }
        // SAFETY: it is neither null nor misaligned, does not exceed the address space, and the
        // caller passes as many elements.
        Ok(unsafe { std::slice::from_raw_parts(self.0, len) })
    }
}

/// An array that a function writes.
#[repr(transparent)]
pub(crate) struct ArrayMut<T>(*mut T);

impl<T> ArrayMut<T> {
    /// The elements. Null stands for none.
    pub(crate) fn get(&mut self, len: usize, what: &str) -> Result<&mut [T], Failure> {
        check_array(self.0, len, what)?;
        if len == 0 {
            return Ok(&mut []);
        }
        // SAFETY: as in `Array::get`; the caller lends the array for the call alone.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0, len) })
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn address(&self) -> *mut T {
        self.0
    }
}

fn check_array<T>(pointer: *const T, len: usize, what: &str) -> Result<(), Failure> {
    if len == 0 {
        return Ok(());
    }
    if pointer.is_null() {
        return fail(code::INVALID_ARGUMENT, format!("{what} is null, but its length is {len}"));
    }
    if !pointer.is_aligned() {
        return fail(code::INVALID_ARGUMENT, format!("{what} is not aligned for its elements"));
    }
    let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
    match bytes {
        Some(_) => Ok(()),
        None => fail(code::INVALID_ARGUMENT, format!("{what} has {len} elements, more than memory holds")),
    }
}
