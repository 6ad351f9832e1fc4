/* A stand-in for the driver's libcuda.so.1 on a node without a GPU.
 *
 * sgl_kernel's sm100/common_ops.abi3.so links libcuda.so.1 and will not load without it, even to serve on a CPU. These
 * are the entry points it needs (nm -D --undefined-only). Each answers 100, CUDA_ERROR_NO_DEVICE, which is the truth.
 */
#define NO_DEVICE(name) int name(void) { return 100; }

NO_DEVICE(cuGetErrorString)
NO_DEVICE(cuMemAddressFree)
NO_DEVICE(cuMemGetAddressRange_v2)
NO_DEVICE(cuMemRelease)
NO_DEVICE(cuMemRetainAllocationHandle)
NO_DEVICE(cuMemSetAccess)
NO_DEVICE(cuMemUnmap)
NO_DEVICE(cuPointerGetAttribute)
