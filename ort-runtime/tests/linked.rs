//! Each feature links its provider, and nothing else does.
#![allow(missing_docs)]

#[test]
fn features_link_their_providers() {
    let linked: Vec<&str> = ort_runtime::ep::providers().iter().map(|provider| provider.name()).collect();
    let expected: &[&str] = if cfg!(feature = "cpu") { &["cpu"] } else { &[] };
    assert_eq!(linked, expected);
}
