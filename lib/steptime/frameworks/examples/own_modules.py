"""Networks of one's own, for `steptime measure --torch`: functions that make a torch module, and nothing of ours.

unet: skip connections, joined by concatenation. tied: a language model whose output layer is its embedding, with a
parameter that it forgot. torch.nn.Transformer needs no more than its settings.
"""

import torch
from torch import nn


def transformer():
    """--input 16,64 --input 16,64: what is read and what is written, 16 steps of 64 features."""
    return nn.Transformer(64, 4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=128, batch_first=True)


class UNet(nn.Module):
    """Two levels down, two up; each level's output is joined to what comes up to it."""

    def __init__(self, classes=5):
        super().__init__()
        self.down1, self.down2 = self.block(3, 16), self.block(16, 32)
        self.bottom = self.block(32, 64)
        self.up2, self.join2 = nn.ConvTranspose2d(64, 32, 2, stride=2), self.block(64, 32)
        self.up1, self.join1 = nn.ConvTranspose2d(32, 16, 2, stride=2), self.block(32, 16)
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(16, classes, 1)

    @staticmethod
    def block(inputs, outputs):
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(self.pool(first))
        x = self.up2(self.bottom(self.pool(second)))
        x = self.up1(self.join2(torch.cat([x, second], 1)))
        return self.head(self.join1(torch.cat([x, first], 1)))


def unet():
    """--input 3,32,32."""
    return UNet()


class Tied(nn.Module):
    def __init__(self, vocabulary=500, features=64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.body = nn.LSTM(features, features, batch_first=True)
        self.head = nn.Linear(features, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.forgotten = nn.Parameter(torch.zeros(7))

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens))[0])


def tied():
    """--input 12:500: 12 tokens, each below 500."""
    return Tied()
