//! The provider is found by name like any other.

use crate::support::{count, layer, layer_data, run_one};
use ort_core::ep::{ProviderOptions, provider, providers};
use ort_core::session::{Model, Session};
use ort_core::{ErrorKind, Result};

// Naming the crate links its provider.
use ort_testkit as _;

#[test]
fn it_is_registered_beside_the_cpu() -> Result<()> {
    let names: Vec<&str> = providers().iter().map(|provider| provider.name()).collect();
    assert_eq!(names, ["cpu", "opaque"]);
    let session =
        Session::builder(&Model::from_graph(layer()?)).provider("opaque").provider("cpu").build()?;
    assert_eq!(count(&session, "MatMul", "opaque"), 1);
    let (input, expected) = layer_data()?;
    assert_eq!(run_one(&session, input)?, expected.tensor()?.to_vec::<f32>()?);
    Ok(())
}

#[test]
fn options_are_checked() -> Result<()> {
    let open = |name: &str, value: &str| {
        let options = ProviderOptions::from([(name.to_string(), value.to_string())]);
        provider("opaque")?.open(0, &options)
    };
    assert_eq!(open("memory_limit", "4096")?.info().memory_bytes, Some(4096));
    for (name, value) in [("memory_limit", "much"), ("speed", "11")] {
        let problem = open(name, value).err().expect("the option is refused");
        assert_eq!(problem.kind(), ErrorKind::InvalidArgument);
        assert!(problem.to_string().contains(name), "{problem}");
    }
    let problem = open("memry_limit", "4096").err().expect("the option is refused").to_string();
    assert!(problem.contains("did you mean 'memory_limit'?"), "{problem}");
    let problem = provider("opaque")?.open(1, &ProviderOptions::new()).err();
    assert_eq!(problem.map(|problem| problem.kind()), Some(ErrorKind::InvalidArgument));
    Ok(())
}
