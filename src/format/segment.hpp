// Placeholder replaced by the owner of src/shm: the byte layout of the shared segment.
#pragma once
namespace deltasync::shm { struct ControlBlock; }
