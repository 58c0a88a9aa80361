    batch_size = batch_size // 2
