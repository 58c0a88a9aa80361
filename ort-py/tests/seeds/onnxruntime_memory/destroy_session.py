    del session
