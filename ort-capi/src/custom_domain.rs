//! `OrtCustomOpDomain`: a client's operators of one domain.

use std::collections::BTreeMap;
use std::sync::Arc;

use ort_runtime::fork::Mutex;
use ort_runtime::{CustomOperator, CustomOperators};
use ort_sys::OrtCustomOp;

use crate::custom_op::{Operator, Shared, Table};
use crate::entry::{In, InMut, Object, Out, Released, Text, entries, kinds};
use crate::session_options::SessionOptions;
use crate::status::Outcome;

/// A domain of a client, which session options share: operators that are added later count, too.
#[derive(Clone)]
pub(crate) struct Domain(Arc<Declared>);

struct Declared {
    name: String,
    operators: Mutex<Vec<Table>>,
}

kinds! {
    Domain => "OrtCustomOpDomain", b"OrtCuOpD";
}

/// The custom operators of session options.
pub(crate) fn operators(options: &SessionOptions) -> Outcome<CustomOperators> {
    if options.domains.is_empty() {
        return Ok(CustomOperators::default());
    }
    let entries: Arc<BTreeMap<String, String>> = Arc::new(options.entries.clone());
    let shared = Shared { entries: &entries, libraries: &options.libraries };
    let mut all: Vec<Arc<dyn CustomOperator>> = Vec::new();
    for Domain(domain) in &options.domains {
        // Copied out: the client's functions may call back into the library.
        let tables = domain.operators.lock().clone();
        for table in tables {
            all.push(Arc::new(Operator::new(&domain.name, table, &shared)?));
        }
    }
    Ok(CustomOperators::new(all)?)
}

entries! {
    /// 26
    fn CreateCustomOpDomain(name: Text, out: Out<*mut Object<Domain>>) {
        let out = out.place()?;
        let name = name.get("the name of the domain")?.to_owned();
        out.put(Object::give(Domain(Arc::new(Declared { name, operators: Mutex::new(Vec::new()) }))));
        Ok(())
    }

    /// 27
    fn CustomOpDomain_Add(domain: In<Domain>, operator: *const OrtCustomOp) {
        let Domain(domain) = domain.get()?;
        let table = Table::new(operator)?;
        domain.operators.lock().push(table);
        Ok(())
    }

    /// 28
    fn AddCustomOpDomain(options: InMut<SessionOptions>, domain: In<Domain>) {
        let domain = domain.get()?.clone();
        options.get()?.domains.push(domain);
        Ok(())
    }

    /// 101
    fn ReleaseCustomOpDomain(domain: Released<Domain>) -> (), else (), {
        domain.release();
    }
}
