import torch
import onnxruntime as ort #Only used for model loading in this example - training is via PyTorch

# ... Model definition and data loading ...

optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
accumulation_steps = 4 #Number of steps before gradient update

for epoch in range(num_epochs):
    for i, (inputs, labels) in enumerate(train_loader):
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss = loss / accumulation_steps #Divide loss to account for accumulation
        loss.backward()

        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
