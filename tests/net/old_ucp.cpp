// A libucp of a version that is too old.
extern "C" __attribute__((visibility("default"))) void ucp_get_version(unsigned* major, unsigned* minor,
                                                                       unsigned* release) {
  *major = 1;
  *minor = 13;
  *release = 1;
}
