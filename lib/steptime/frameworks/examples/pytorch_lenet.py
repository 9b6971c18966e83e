"""LeNet as PyTorch's own tutorials train: an nn.Module, torch.optim.SGD, a loop over batches. Written for comparison.

Loaded by worker.py in place of an adapter, with the little of its contract that timing steps needs.
"""

import torch
from torch import nn

CHANNELS_LAST = False


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten()
        )
        self.classifier = nn.Sequential(nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))

    def forward(self, x):
        return self.classifier(self.features(x))


def versions():
    return {"framework": torch.__version__, "blas": "unknown"}


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    return Trainer(learning_rate, torch.device(device))


class Trainer(object):
    def __init__(self, learning_rate, device):
        self.device = device
        self.model = LeNet().to(device)
        self.loss_function = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)
        self.model.train()

    def step(self, images, labels):
        images, labels = torch.from_numpy(images).to(self.device), torch.from_numpy(labels).to(self.device)
        loss = self.loss_function(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def shapes(self, images):
        return {}

    def parameter_count(self):
        return sum(parameter.numel() for parameter in self.model.parameters())
