// libnccl.so.2 of a release without ncclCommAbort().
extern "C" {

int ncclCommInitAll(void** /*comms*/, int /*count*/, const int* /*devices*/) {
  return 0;
}
int ncclBroadcast() {
  return 0;
}
int ncclGroupStart() {
  return 0;
}
int ncclGroupEnd() {
  return 0;
}
const char* ncclGetErrorString(int /*result*/) {
  return "";
}

}  // extern "C"
