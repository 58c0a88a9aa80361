    outputs = session.run(None, inputs)
    del outputs  # Release immediately
