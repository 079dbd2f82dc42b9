package deadletter

// Narrow makes Page and CountFew read fewer letters.
func (r *Reader) Narrow(window, windows, most int) {
	r.window, r.windows, r.most = window, windows, most
}
