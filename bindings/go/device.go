package dsv4

// #include <dsv4.h>
import "C"

// DeviceInfo describes a GPU.
type DeviceInfo struct {
	// Total memory in bytes; 0 where it is not known.
	MemoryBytes uint64
	// What EngineOptions.Device takes: "cuda:0".
	ID string
	// Name for people.
	Name string
}

// Devices lists the GPUs. Where there is none the error is [ErrUnavailable] with the reason and the remedy, and the CPU
// works all the same.
func Devices() ([]DeviceInfo, error) {
	var n C.size_t
	if err := call(func(e *C.dsv4_error) C.dsv4_status { return C.dsv4_device_count(&n, e) }); err != nil {
		return nil, err
	}
	devices := make([]DeviceInfo, n)
	for i := range devices {
		var c C.dsv4_device_info
		c.size = C.sizeof_dsv4_device_info
		err := call(func(e *C.dsv4_error) C.dsv4_status { return C.dsv4_device_get_info(C.size_t(i), &c, e) })
		if err != nil {
			return nil, err
		}
		fromC(&c, &devices[i])
	}
	return devices, nil
}
