//! `OrtTypeInfo` and its parts: types of inputs, outputs and values.

use std::collections::HashSet;
use std::ffi::{CString, c_char};

use ort_runtime::dim::Dim;
use ort_runtime::ir::{TensorType, ValueType};
use ort_runtime::onnx::DeclaredSize;

use crate::element_type::{known, number_of};
use crate::entry::{Array, ArrayMut, In, InMut, Object, Out, Released, Text, entries, kinds};
use crate::status::{Failure, Outcome, invalid};

/// The numbers of `ONNXType`.
pub(crate) mod onnx_type {
    pub(crate) const UNKNOWN: i32 = 0;
    pub(crate) const TENSOR: i32 = 1;
    pub(crate) const SEQUENCE: i32 = 2;
    pub(crate) const MAP: i32 = 3;
    pub(crate) const SPARSE: i32 = 5;
    pub(crate) const OPTIONAL: i32 = 6;
}

/// Element type and shape of a tensor.
#[derive(Clone, Debug, Default)]
pub(crate) struct TensorInfo {
    /// The number of the element type; 0 if it is not set.
    pub(crate) element_type: i32,
    /// The sizes, -1 for those that are not known.
    pub(crate) dims: Vec<i64>,
    /// The names of the sizes, empty for those without one.
    names: Vec<CString>,
    pub(crate) has_shape: bool,
}

/// The type of a value.
#[derive(Clone)]
pub(crate) enum TypeInfo {
    Unknown,
    Tensor(Object<TensorInfo>),
    Sparse(Object<TensorInfo>),
    Sequence(Object<ElementInfo>),
    Map(Object<MapInfo>),
    Optional(Object<OptionalInfo>),
}

/// The type of a sequence's elements.
#[derive(Clone)]
pub(crate) struct ElementInfo(Box<TypeInfo>);

/// The type of what an optional holds.
#[derive(Clone)]
pub(crate) struct OptionalInfo(Box<TypeInfo>);

/// The types of a map.
#[derive(Clone)]
pub(crate) struct MapInfo {
    key: i32,
    value: Box<TypeInfo>,
}

kinds! {
    TensorInfo => "OrtTensorTypeAndShapeInfo", b"OrtTnsTy";
    TypeInfo => "OrtTypeInfo", b"OrtTypeI";
    ElementInfo => "OrtSequenceTypeInfo", b"OrtSeqTy";
    OptionalInfo => "OrtOptionalTypeInfo", b"OrtOptTy";
    MapInfo => "OrtMapTypeInfo", b"OrtMapTy";
}

impl TensorInfo {
    /// The names of the sizes, empty for those without one.
    pub(crate) fn names(&self) -> &[CString] {
        &self.names
    }

    /// The info of a tensor with these sizes.
    pub(crate) fn of_sizes(element_type: i32, sizes: &[i64]) -> TensorInfo {
        let names = vec![CString::default(); sizes.len()];
        TensorInfo { element_type, dims: sizes.to_vec(), names, has_shape: true }
    }

    /// Each size with its name.
    pub(crate) fn named_dims(&self) -> impl Iterator<Item = (i64, &CString)> {
        self.dims.iter().copied().zip(&self.names)
    }

    pub(crate) fn set_name(&mut self, index: usize, name: CString) {
        self.names.iter_mut().skip(index).take(1).for_each(|to| *to = name.clone());
    }

    fn of_type(ty: &TensorType, shape: &ShapeSource<'_>) -> TensorInfo {
        let mut info = TensorInfo { element_type: number_of(ty.dtype), ..TensorInfo::default() };
        let inferred = ty.shape.as_deref();
        let rank = shape.declared.map(<[_]>::len).or(inferred.map(<[_]>::len));
        let Some(rank) = rank else { return info };
        info.has_shape = true;
        let inferred = inferred.filter(|sizes| sizes.len() == rank).unwrap_or_default();
        for axis in 0..rank {
            let (size, name) = shape.size(axis, inferred.get(axis));
            info.dims.push(size);
            info.names.push(CString::new(name).unwrap_or_default());
        }
        info
    }
}

/// Where the sizes of a type come from, besides inference.
#[derive(Clone, Copy, Default)]
pub(crate) struct ShapeSource<'a> {
    /// What the model declares: programs look names up to the letter.
    pub(crate) declared: Option<&'a [DeclaredSize]>,
    /// Names that the loader gave to sizes without one.
    pub(crate) invented: Option<&'a HashSet<String>>,
}

impl<'a> ShapeSource<'a> {
    /// Returns the size at an axis, or -1, and its name. Inference adds the numbers that the
    /// declaration leaves open.
    fn size(&self, axis: usize, inferred: Option<&'a Dim>) -> (i64, &'a str) {
        if let Some(size) = inferred.and_then(Dim::as_constant) {
            return (size, "");
        }
        match self.declared.and_then(|declared| declared.get(axis)) {
            Some(DeclaredSize::Number(size)) => (*size, ""),
            Some(DeclaredSize::Name(name)) => (-1, name),
            Some(DeclaredSize::Open) => (-1, ""),
            None => {
                let name = inferred.and_then(Dim::as_symbol).and_then(|symbol| symbol.name());
                let is_invented = |name: &str| self.invented.is_some_and(|names| names.contains(name));
                (-1, name.filter(|name| !is_invented(name)).unwrap_or_default())
            }
        }
    }
}

impl TypeInfo {
    /// The info of a type of the engine.
    pub(crate) fn of(ty: &ValueType, shape: &ShapeSource<'_>) -> TypeInfo {
        let inner = |element: &ValueType| Box::new(TypeInfo::of(element, &ShapeSource::default()));
        match ty {
            ValueType::Unknown => TypeInfo::Unknown,
            ValueType::Tensor(ty) => TypeInfo::Tensor(Object::new(TensorInfo::of_type(ty, shape))),
            ValueType::Sparse(ty) => TypeInfo::Sparse(Object::new(TensorInfo::of_type(ty, shape))),
            ValueType::Sequence(element) => TypeInfo::Sequence(Object::new(ElementInfo(inner(element)))),
            ValueType::Optional(element) => {
                TypeInfo::Optional(Object::new(OptionalInfo(Box::new(TypeInfo::of(element, shape)))))
            }
            ValueType::Map(key, value) => {
                TypeInfo::Map(Object::new(MapInfo { key: number_of(*key), value: inner(value) }))
            }
        }
    }

    pub(crate) fn sequence(element: TypeInfo) -> TypeInfo {
        TypeInfo::Sequence(Object::new(ElementInfo(Box::new(element))))
    }

    pub(crate) fn optional(element: TypeInfo) -> TypeInfo {
        TypeInfo::Optional(Object::new(OptionalInfo(Box::new(element))))
    }

    /// A map with keys of a type by its number.
    pub(crate) fn map(key: i32, value: TypeInfo) -> Outcome<TypeInfo> {
        match known(key) {
            Some(_) => Ok(TypeInfo::Map(Object::new(MapInfo { key, value: Box::new(value) }))),
            None => invalid(format!("Invalid key type: {key}; ONNXTensorElementDataType is 1 to 26")),
        }
    }

    fn number(&self) -> i32 {
        match self {
            TypeInfo::Unknown => onnx_type::UNKNOWN,
            TypeInfo::Tensor(_) => onnx_type::TENSOR,
            TypeInfo::Sparse(_) => onnx_type::SPARSE,
            TypeInfo::Sequence(_) => onnx_type::SEQUENCE,
            TypeInfo::Map(_) => onnx_type::MAP,
            TypeInfo::Optional(_) => onnx_type::OPTIONAL,
        }
    }
}

/// Checks sizes that a caller gives for a type: -1 stands for an unknown one.
fn checked_dims(dims: &[i64]) -> Outcome<Vec<i64>> {
    match dims.iter().find(|size| **size < -1) {
        // Programs compare the whole text.
        Some(_) => invalid("dim_values must be -1 (symbolic dimension) or larger."),
        None => Ok(dims.to_vec()),
    }
}

entries! {
    /// 55
    fn CastTypeInfoToTensorInfo(info: In<TypeInfo>, out: Out<*const Object<TensorInfo>>) {
        let out = out.place()?;
        out.put(match info.get()? {
            TypeInfo::Tensor(tensor) | TypeInfo::Sparse(tensor) => tensor,
            _ => std::ptr::null(),
        });
        Ok(())
    }

    /// 56
    fn GetOnnxTypeFromTypeInfo(info: In<TypeInfo>, out: Out<i32>) {
        let out = out.place()?;
        out.put(info.get()?.number());
        Ok(())
    }

    /// 57
    fn CreateTensorTypeAndShapeInfo(out: Out<*mut Object<TensorInfo>>) {
        out.place()?.put(Object::give(TensorInfo { has_shape: true, ..TensorInfo::default() }));
        Ok(())
    }

    /// 58
    fn SetTensorElementType(info: InMut<TensorInfo>, number: i32) {
        let info = info.get()?;
        if number != 0 && known(number).is_none() {
            return invalid(format!("Invalid element type: {number}; ONNXTensorElementDataType is 0 to 26"));
        }
        info.element_type = number;
        Ok(())
    }

    /// 59
    fn SetDimensions(info: InMut<TensorInfo>, dims: Array<i64>, count: usize) {
        let info = info.get()?;
        info.dims = checked_dims(dims.get(count, "the array of dimensions")?)?;
        info.names = vec![CString::default(); count];
        info.has_shape = true;
        Ok(())
    }

    /// 271
    fn SetSymbolicDimensions(info: InMut<TensorInfo>, names: Array<Text>, count: usize) {
        let info = info.get()?;
        let names = names.get(count, "the array of names of dimensions")?;
        if count != info.dims.len() {
            return invalid(format!("there are {count} names for {} dimensions", info.dims.len()));
        }
        let owned = |name: &Text| Ok(CString::new(name.or_empty("the name of a dimension")?).unwrap_or_default());
        info.names = names.iter().map(owned).collect::<Outcome<_>>()?;
        Ok(())
    }

    /// 60
    fn GetTensorElementType(info: In<TensorInfo>, out: Out<i32>) {
        let out = out.place()?;
        out.put(info.get()?.element_type);
        Ok(())
    }

    /// 61
    fn GetDimensionsCount(info: In<TensorInfo>, out: Out<usize>) {
        let out = out.place()?;
        out.put(info.get()?.dims.len());
        Ok(())
    }

    /// 62
    fn GetDimensions(info: In<TensorInfo>, dims: ArrayMut<i64>, count: usize) {
        let to = dims.get(count, "the array of dimensions")?;
        to.iter_mut().zip(&info.get()?.dims).for_each(|(to, size)| *to = *size);
        Ok(())
    }

    /// 63
    fn GetSymbolicDimensions(info: In<TensorInfo>, names: ArrayMut<*const c_char>, count: usize) {
        let to = names.get(count, "the array of names of dimensions")?;
        to.iter_mut().zip(&info.get()?.names).for_each(|(to, name)| *to = name.as_ptr());
        Ok(())
    }

    /// 64
    fn GetTensorShapeElementCount(info: In<TensorInfo>, out: Out<usize>) {
        let out = out.place()?;
        let product = |count: usize, size: &i64| count.checked_mul(usize::try_from(*size).ok()?);
        let count = info.get()?.dims.iter().try_fold(1, product);
        out.put(count.ok_or_else(|| Failure::invalid("the shape has a dimension that is not known"))?);
        Ok(())
    }

    /// 390
    fn TensorTypeAndShape_HasShape(info: In<TensorInfo>) -> bool, else false, {
        info.get().is_ok_and(|info| info.has_shape)
    }

    /// 98
    fn ReleaseTypeInfo(info: Released<TypeInfo>) -> (), else (), {
        info.release();
    }

    /// 99
    fn ReleaseTensorTypeAndShapeInfo(info: Released<TensorInfo>) -> (), else (), {
        info.release();
    }

    /// 102
    fn GetDenotationFromTypeInfo(info: In<TypeInfo>, denotation: Out<*const c_char>, len: Out<usize>) {
        let (denotation, len) = (denotation.place()?, len.place()?);
        info.get()?;
        denotation.put(c"".as_ptr());
        len.put(0);
        Ok(())
    }

    /// 103
    fn CastTypeInfoToMapTypeInfo(info: In<TypeInfo>, out: Out<*const Object<MapInfo>>) {
        let out = out.place()?;
        out.put(match info.get()? {
            TypeInfo::Map(map) => map,
            _ => std::ptr::null(),
        });
        Ok(())
    }

    /// 104
    fn CastTypeInfoToSequenceTypeInfo(info: In<TypeInfo>, out: Out<*const Object<ElementInfo>>) {
        let out = out.place()?;
        out.put(match info.get()? {
            TypeInfo::Sequence(element) => element,
            _ => std::ptr::null(),
        });
        Ok(())
    }

    /// 250
    fn CastTypeInfoToOptionalTypeInfo(info: In<TypeInfo>, out: Out<*const Object<OptionalInfo>>) {
        let out = out.place()?;
        out.put(match info.get()? {
            TypeInfo::Optional(element) => element,
            _ => std::ptr::null(),
        });
        Ok(())
    }

    /// 105
    fn GetMapKeyType(info: In<MapInfo>, out: Out<i32>) {
        let out = out.place()?;
        out.put(info.get()?.key);
        Ok(())
    }

    /// 106
    fn GetMapValueType(info: In<MapInfo>, out: Out<*mut Object<TypeInfo>>) {
        let out = out.place()?;
        out.put(Object::give((*info.get()?.value).clone()));
        Ok(())
    }

    /// 107
    fn GetSequenceElementType(info: In<ElementInfo>, out: Out<*mut Object<TypeInfo>>) {
        let out = out.place()?;
        out.put(Object::give((*info.get()?.0).clone()));
        Ok(())
    }

    /// 251
    fn GetOptionalContainedTypeInfo(info: In<OptionalInfo>, out: Out<*mut Object<TypeInfo>>) {
        let out = out.place()?;
        out.put(Object::give((*info.get()?.0).clone()));
        Ok(())
    }

    /// 108
    fn ReleaseMapTypeInfo(info: Released<MapInfo>) -> (), else (), {
        // It is part of the type info that it was cast from.
        let _ = info;
    }

    /// 109
    fn ReleaseSequenceTypeInfo(info: Released<ElementInfo>) -> (), else (), {
        let _ = info;
    }
}
