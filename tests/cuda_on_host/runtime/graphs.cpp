// SPDX-License-Identifier: BSD-3-Clause
// Graphs: what a capture recorded, done again at each launch.
#include "state.h"

namespace stand_in {

namespace {

/// What cudaGraphExec_t points to.
struct Program {
  Graph* graph;
};

template <class Get>
void list_nodes(const std::vector<Node*>& nodes, cudaGraphNode_t* result, std::size_t* count,
                Get is_listed) {
  std::size_t n = 0;
  for (Node* node : nodes) {
    if (!is_listed(*node)) continue;
    if (result && n < *count) result[n] = reinterpret_cast<cudaGraphNode_t>(node);
    ++n;
  }
  *count = n;
}

}  // namespace

void release(UserObject* object, unsigned references) {
  object->references -= references;
  if (object->references > 0) return;
  object->destroy(object->data);
  delete object;
}

void release(Graph* graph) {
  if (--graph->references > 0) return;
  for (UserObject* object : graph->objects) release(object, 1);
  for (Node* node : graph->nodes) delete node;
  delete graph;
}

}  // namespace stand_in

using namespace stand_in;

extern "C" {

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* result, cudaGraph_t handle,
                                          unsigned long long) {
  const Lock lock;
  if (const cudaError_t error = unsafe("cudaGraphInstantiate")) return error;
  auto* const graph = reinterpret_cast<Graph*>(handle);
  ++graph->references;
  *result = reinterpret_cast<cudaGraphExec_t>(new Program{graph});
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* result, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(result, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  const Lock lock;
  Stream* const stream = stream_of(stream_handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle, "cudaGraphLaunch");
  if (stream->capture)
    return invalidate(stream->capture, cudaErrorNotSupported, "cudaGraphLaunch in a capture");
  Graph* const graph = reinterpret_cast<Program*>(handle)->graph;
  ++counts().graph_launches;
  for (const Node* node : graph->nodes) counts().replayed_nodes += node->is_visible;
  ++graph->references;  // its last launch may come after its end
  return give(stream, "graph", Kind::kernel, [graph] {
    for (const Node* node : graph->nodes) node->work();
    release(graph);
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  const Lock lock;
  auto* const program = reinterpret_cast<Program*>(handle);
  release(program->graph);
  delete program;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const Lock lock;
  release(reinterpret_cast<Graph*>(graph));
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  const Lock lock;
  list_nodes(reinterpret_cast<Graph*>(graph)->nodes, nodes, count,
             [](const Node& node) { return node.is_visible; });
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* nodes,
                                         cudaGraphEdgeData*, std::size_t* count) {
  const Lock lock;
  list_nodes(reinterpret_cast<Node*>(node)->after, nodes, count, [](const Node&) { return true; });
  return cudaSuccess;
}

// What LibTorch keeps alive with a graph: its generators' states.
cudaError_t cudaUserObjectCreate(cudaUserObject_t* result, void* data, cudaHostFn_t destroy,
                                 unsigned references, unsigned) {
  const Lock lock;
  *result = reinterpret_cast<cudaUserObject_t>(new UserObject{data, destroy, references});
  return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned references) {
  const Lock lock;
  release(reinterpret_cast<UserObject*>(object), references);
  return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t handle,
                                      unsigned references, unsigned flags) {
  const Lock lock;
  auto* const object = reinterpret_cast<UserObject*>(handle);
  if (!(flags & cudaGraphUserObjectMove)) object->references += references;
  auto& objects = reinterpret_cast<Graph*>(graph)->objects;
  objects.insert(objects.end(), references, object);
  return cudaSuccess;
}
}
