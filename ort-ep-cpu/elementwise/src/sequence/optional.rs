//! Optional values: `Optional`, `OptionalHasElement` and `OptionalGetElement`.

use ort_core::ep::{CompileCx, Executable, KernelDef, OutputsFrom, RunCx};
use ort_core::ir::ValueType;
use ort_core::tensor::{OptionalValue, Value, ValueView};
use ort_core::{Result, error};

use ort_cpu_kernel::cpu_kernels;

cpu_kernels![
    KernelDef { op: "Optional", outputs: OutputsFrom::Kernel, make, ..KernelDef::BASE },
    KernelDef { op: "OptionalHasElement", make: |_| Ok(Box::new(has_element)), ..KernelDef::BASE },
    KernelDef {
        op: "OptionalGetElement",
        outputs: OutputsFrom::Kernel,
        make: |_| Ok(Box::new(get_element)),
        ..KernelDef::BASE
    },
];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let element_type = match cx.node.output_type(0) {
        ValueType::Optional(element) => *element,
        _ => ValueType::Unknown,
    };
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let element = match cx.has_input(0) {
            true => Some(Box::new(cx.own_input(0)?)),
            false => None,
        };
        cx.set(0, Value::Optional(OptionalValue { element_type: element_type.clone(), element }))
    }))
}

fn has_element(cx: &mut RunCx<'_>) -> Result<()> {
    let present = match cx.has_input(0) {
        false => false,
        true => match cx.input_value(0)? {
            ValueView::Value(Value::Optional(optional)) => optional.element.is_some(),
            // A value that is no optional counts as present.
            _ => true,
        },
    };
    cx.output(0)?.bytes_mut()?.fill(u8::from(present));
    Ok(())
}

fn get_element(cx: &mut RunCx<'_>) -> Result<()> {
    let value = match cx.input_value(0)? {
        ValueView::Value(Value::Optional(optional)) => {
            let element = optional.element.as_deref();
            element.ok_or_else(|| error!(InvalidArgument, "the optional has no element"))?.clone()
        }
        _ => cx.own_input(0)?,
    };
    cx.set(0, value)
}
