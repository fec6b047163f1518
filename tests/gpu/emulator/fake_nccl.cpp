// libnccl.so.2 as far as src/gpu/nccl.cpp opens it: what it does is the program's (test_fake_nccl.cpp).
#include <cstddef>

extern "C" {

int fake_nccl_init_all(void** comms, int count, const int* devices);
int fake_nccl_abort(void* comm);
int fake_nccl_broadcast(const void* from, void* to, std::size_t count, int type, int root, void* comm, void* stream);
int fake_nccl_group_start();
int fake_nccl_group_end();

int ncclCommInitAll(void** comms, int count, const int* devices) {
  return fake_nccl_init_all(comms, count, devices);
}
int ncclCommAbort(void* comm) {
  return fake_nccl_abort(comm);
}
int ncclBroadcast(const void* from, void* to, std::size_t count, int type, int root, void* comm, void* stream) {
  return fake_nccl_broadcast(from, to, count, type, root, comm, stream);
}
int ncclGroupStart() {
  return fake_nccl_group_start();
}
int ncclGroupEnd() {
  return fake_nccl_group_end();
}
const char* ncclGetErrorString(int result) {
  return result == 2 ? "unhandled system error" : "invalid argument";
}

}  // extern "C"
