// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/data/datasets/mnist.h>

#include <filesystem>
#include <string>

#include "support/arguments.h"
#include "support/gzip.h"
#include "support/temporary_folder.h"

/// Both parts of Fashion-MNIST, in memory: images of 28 x 28 values from 0 to 1, ten classes.
struct FashionMnist {
  torch::data::datasets::MNIST train, test;
};

/// Reads the four files of Fashion-MNIST, plain or packed as *.gz, from `folder`. Packed ones are
/// unpacked into a temporary folder first, since LibTorch reads plain files only.
/// Throws support::UsageError if one is missing.
inline FashionMnist read_fashion_mnist(const std::filesystem::path& folder) {
  using Mode = torch::data::datasets::MNIST::Mode;
  const support::TemporaryFolder unpacked("torchamp-fashion-mnist");
  for (const char* const name : {"train-images-idx3-ubyte", "train-labels-idx1-ubyte",
                                 "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"}) {
    const auto plain = folder / name;
    const auto packed = folder / (std::string(name) + ".gz");
    if (std::filesystem::exists(plain)) {
      std::filesystem::create_symlink(std::filesystem::absolute(plain), unpacked.path() / name);
    } else if (std::filesystem::exists(packed)) {
      support::unpack_gzip(packed, unpacked.path() / name);
    } else {
      throw support::UsageError(
          "there is no '" + plain.string() + "' and no '" + packed.filename().string() +
          "' there.\nFashion-MNIST is Debian's and Ubuntu's package dataset-fashion-mnist (apt "
          "install dataset-fashion-mnist);\notherwise name the folder with its four files with "
          "--data");
    }
  }
  return {torch::data::datasets::MNIST(unpacked.path().string(), Mode::kTrain),
          torch::data::datasets::MNIST(unpacked.path().string(), Mode::kTest)};
}
