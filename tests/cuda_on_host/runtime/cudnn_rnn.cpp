// SPDX-License-Identifier: BSD-3-Clause
// cuDNN's recurrent layers: the place of each matrix in the common buffer.
#include <cudnn.h>

#include <vector>

#include "cuda_on_host/stand_in.h"

namespace {

struct Rnn {
  cudnnRNNMode_t cell;
  bool has_bias, is_bidirectional;
  cudnnDataType_t type;
  int input, hidden, projection, layers;

  int gates() const { return cell == CUDNN_LSTM ? 4 : cell == CUDNN_GRU ? 3 : 1; }
  int directions() const { return is_bidirectional ? 2 : 1; }
  bool projects() const { return projection > 0 && projection != hidden; }
  int output() const { return projects() ? projection : hidden; }
  size_t element_size() const {
    return type == CUDNN_DATA_DOUBLE ? 8 : type == CUDNN_DATA_FLOAT ? 4 : 2;
  }
};

struct Matrix {
  int layer, index;  // of cuDNN's "pseudo layer" and linear layer
  bool is_bias;
  int rows, columns;
  size_t offset;  // in elements
};

/// All matrices and then all biases, layer by layer; for the input first, then for the state.
std::vector<Matrix> matrices_of(const Rnn& rnn) {
  std::vector<Matrix> result;
  size_t offset = 0;
  const auto add = [&](int layer, int index, bool is_bias, int rows, int columns) {
    result.push_back({layer, index, is_bias, rows, columns, offset});
    offset += static_cast<size_t>(rows) * static_cast<size_t>(columns);
  };
  const int layers = rnn.layers * rnn.directions(), gates = rnn.gates();
  for (int layer = 0; layer < layers; ++layer) {
    const int input = layer < rnn.directions() ? rnn.input : rnn.output() * rnn.directions();
    for (int i = 0; i < gates; ++i) add(layer, i, false, rnn.hidden, input);
    for (int i = gates; i < 2 * gates; ++i) add(layer, i, false, rnn.hidden, rnn.output());
    if (rnn.projects()) add(layer, 2 * gates, false, rnn.output(), rnn.hidden);
  }
  for (int layer = 0; rnn.has_bias && layer < layers; ++layer) {
    for (int i = 0; i < 2 * gates; ++i) add(layer, i, true, rnn.hidden, 1);
  }
  return result;
}

Rnn& get(cudnnRNNDescriptor_t handle) {
  return *reinterpret_cast<Rnn*>(handle);
}

void describe(const Rnn& rnn, int layer, int index, bool is_bias, const void* buffer,
              cudnnTensorDescriptor_t descriptor, void** address) {
  if (!descriptor || !address) return;
  int sizes[3] = {}, strides[3] = {};
  *address = nullptr;
  for (const Matrix& m : matrices_of(rnn)) {
    if (m.layer != layer || m.index != index || m.is_bias != is_bias) continue;
    *address = static_cast<char*>(const_cast<void*>(buffer)) + m.offset * rnn.element_size();
    sizes[0] = 1, sizes[1] = m.rows, sizes[2] = m.columns;
    strides[0] = m.rows * m.columns, strides[1] = m.columns, strides[2] = 1;
  }
  cudnnSetTensorNdDescriptor(descriptor, rnn.type, 3, sizes, strides);
}

}  // namespace

extern "C" {

cudnnStatus_t cudnnCreateRNNDescriptor(cudnnRNNDescriptor_t* handle) {
  *handle = reinterpret_cast<cudnnRNNDescriptor_t>(new Rnn());
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroyRNNDescriptor(cudnnRNNDescriptor_t handle) {
  delete &get(handle);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t handle, cudnnRNNAlgo_t,
                                       cudnnRNNMode_t cell, cudnnRNNBiasMode_t bias,
                                       cudnnDirectionMode_t direction, cudnnRNNInputMode_t,
                                       cudnnDataType_t type, cudnnDataType_t, cudnnMathType_t,
                                       int32_t input, int32_t hidden, int32_t projection,
                                       int32_t layers, cudnnDropoutDescriptor_t, uint32_t) {
  get(handle) = {.cell = cell,
                 .has_bias = bias != CUDNN_RNN_NO_BIAS,
                 .is_bidirectional = direction == CUDNN_BIDIRECTIONAL,
                 .type = type,
                 .input = input,
                 .hidden = hidden,
                 .projection = projection,
                 .layers = layers};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t, cudnnDataType_t,
                                        cudnnRNNDataLayout_t, int, int, int, const int[], void*) {
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t, cudnnRNNDescriptor_t handle, size_t* size) {
  const Matrix last = matrices_of(get(handle)).back();
  const size_t elements =
      last.offset + static_cast<size_t>(last.rows) * static_cast<size_t>(last.columns);
  *size = elements * get(handle).element_size();
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t, cudnnRNNDescriptor_t, cudnnForwardMode_t,
                                        cudnnRNNDataDescriptor_t, size_t* workspace,
                                        size_t* reserve) {
  if (workspace) *workspace = 1 << 12;
  if (reserve) *reserve = 1 << 12;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t, cudnnRNNDescriptor_t handle, int32_t layer,
                                      size_t, const void* buffer, int32_t index,
                                      cudnnTensorDescriptor_t matrix, void** matrix_address,
                                      cudnnTensorDescriptor_t bias, void** bias_address) {
  describe(get(handle), layer, index, false, buffer, matrix, matrix_address);
  describe(get(handle), layer, index, true, buffer, bias, bias_address);
  return CUDNN_STATUS_SUCCESS;
}
}
