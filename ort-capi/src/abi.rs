//! Function pointers of ours as those of the table.

/// A function pointer of C, with the sizes of its arguments and of its result.
pub(crate) trait Signature: Copy {
    /// The sizes of the arguments, then that of the result.
    const SIZES: &'static [usize];
}

macro_rules! signatures {
    ($(($($argument:ident)*))*) => {
        $(
            impl<$($argument,)* R> Signature for extern "system" fn($($argument),*) -> R {
                const SIZES: &'static [usize] = &[$(size_of::<$argument>(),)* size_of::<R>()];
            }
            impl<$($argument,)* R> Signature for unsafe extern "system" fn($($argument),*) -> R {
                const SIZES: &'static [usize] = &[$(size_of::<$argument>(),)* size_of::<R>()];
            }
        )*
    };
}

signatures! {
    () (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) (A B C D E F G) (A B C D E F G H)
    (A B C D E F G H I) (A B C D E F G H I J) (A B C D E F G H I J K) (A B C D E F G H I J K L)
}

#[allow(clippy::indexing_slicing, reason = "the compiler evaluates it, and the loop checks the place")]
const fn are_equal(one: &[usize], other: &[usize]) -> bool {
    let mut place = 0;
    while place < one.len() && place < other.len() {
        if one[place] != other[place] {
            return false;
        }
        place += 1;
    }
    one.len() == other.len()
}

/// Returns a function of ours as that of a slot.
///
/// Our arguments have the representation of the C types: handles and results are pointers, and
/// enumerations are `i32`, as C may pass any number. The number and the sizes of the arguments are
/// checked when the table is compiled.
pub(crate) const fn slot<F: Signature, G: Signature>(function: F) -> G {
    const { assert!(are_equal(F::SIZES, G::SIZES), "the function does not have the arguments of its slot") };
    // SAFETY: both are function pointers of the same calling convention, number and sizes of
    // arguments; the types are those of the header, as the functions say.
    unsafe { std::mem::transmute_copy::<F, G>(&function) }
}

/// Returns a function that ignores its arguments as that of a slot with a status.
pub(crate) const fn absent<G: Copy>(function: extern "system" fn() -> ort_sys::OrtStatusPtr) -> G {
    const { assert!(size_of::<G>() == size_of::<extern "system" fn()>()) };
    // SAFETY: callers of the slot pass arguments in registers and on their stack, which they clean
    // up, and read a status.
    unsafe { std::mem::transmute_copy::<extern "system" fn() -> ort_sys::OrtStatusPtr, G>(&function) }
}
