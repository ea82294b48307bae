package dsv4

// #include <stdlib.h>
import "C"

import (
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"unsafe"
)

// Structs of Go's mirror structs of C's: a field has the name of C's in the other spelling (CacheBytes, cache_bytes), or
// that in its tag, where "!name" is the opposite. A test compares them, so that no field of C's is forgotten.

// scratch keeps what fields of C's point to until the call is over.
type scratch struct {
	pins    runtime.Pinner
	strings []unsafe.Pointer
}

func (s *scratch) free() {
	s.pins.Unpin()
	for _, text := range s.strings {
		C.free(text)
	}
}

// text is a copy of a text in C's memory, which ends with a NUL; nil for an empty one.
func (s *scratch) text(name, text string) (*C.char, error) {
	if hasNUL(text) {
		return nil, invalid(name + " has a NUL character")
	}
	if text == "" {
		return nil, nil
	}
	copied := C.CString(text)
	s.strings = append(s.strings, unsafe.Pointer(copied))
	return copied, nil
}

// counterpart finds the field of c that mirrors a field of Go's.
func counterpart(field reflect.StructField, c reflect.Type) (name string, not bool, found bool) {
	tag, not := strings.CutPrefix(field.Tag.Get("c"), "!")
	for i := range c.NumField() {
		name := c.Field(i).Name
		if name == tag || tag == "" && strings.ReplaceAll(name, "_", "") == strings.ToLower(field.Name) {
			return name, not, true
		}
	}
	return "", false, false
}

// settable is a field of a struct of C's, whose fields reflect takes for private.
func settable(c reflect.Value, name string) reflect.Value {
	field := c.FieldByName(name)
	return reflect.NewAt(field.Type(), unsafe.Pointer(field.UnsafeAddr())).Elem()
}

// toC copies the fields of from, a struct of Go's, to those of to, a pointer to a struct of C's that has its defaults.
// Fields that are zero stay as they are there, unless all is set. What they point to lives until scratch is freed.
func toC(from, to any, all bool, keep *scratch) error {
	source, target := reflect.ValueOf(from), reflect.ValueOf(to).Elem()
	for i := range source.NumField() {
		field, value := source.Type().Field(i), source.Field(i)
		name, not, found := counterpart(field, target.Type())
		if !found || value.IsZero() && !all {
			continue
		}
		out := settable(target, name)
		switch value.Kind() {
		case reflect.Bool:
			number := int64(0)
			if value.Bool() != not {
				number = 1
			}
			out.SetInt(number)
		case reflect.String:
			text, err := keep.text(name, value.String())
			if err != nil {
				return err
			}
			out.Set(reflect.ValueOf(text).Convert(out.Type()))
		case reflect.Slice:
			settable(target, "n_"+name).SetUint(uint64(value.Len()))
			if value.Len() == 0 {
				continue
			}
			if texts, ok := value.Interface().([]string); ok {
				pointers := make([]*C.char, len(texts))
				for i, text := range texts {
					copied, err := keep.text(fmt.Sprintf("%s[%d]", name, i), text)
					if err != nil {
						return err
					}
					pointers[i] = copied
				}
				value = reflect.ValueOf(pointers)
			}
			keep.pins.Pin(value.UnsafePointer())
			out.Set(reflect.NewAt(out.Type().Elem(), value.UnsafePointer()).Convert(out.Type()))
		default:
			out.Set(value.Convert(out.Type()))
		}
	}
	return nil
}

// fromC copies the fields of from, a pointer to a struct of C's, to those of to, a pointer to a struct of Go's.
func fromC(from, to any) {
	source, target := reflect.ValueOf(from).Elem(), reflect.ValueOf(to).Elem()
	for i := range target.NumField() {
		name, not, found := counterpart(target.Type().Field(i), source.Type())
		if !found {
			continue
		}
		value, out := settable(source, name), target.Field(i)
		switch {
		case out.Kind() == reflect.Bool:
			out.SetBool((value.Int() != 0) != not)
		case out.Kind() == reflect.String && value.Kind() == reflect.Array:
			out.SetString(C.GoString((*C.char)(value.Addr().UnsafePointer())))
		case out.Kind() == reflect.Array:
			for i := range out.Len() {
				out.Index(i).Set(value.Index(i).Convert(out.Type().Elem()))
			}
		default:
			out.Set(value.Convert(out.Type()))
		}
	}
}
