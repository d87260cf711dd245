// What this library was built from, as the build saw it: a file of its own, so that nothing else is compiled again when a
// digest changes. vexact_ops/_core/digest.py says what is in it; empty where it was built by other means than setup.py.
namespace vx {

const char* source_digests() {
#ifdef VEXACT_SOURCE_DIGESTS
  return VEXACT_SOURCE_DIGESTS;
#else
  return "";
#endif
}

}  // namespace vx
