from beamjax.pipelines import log_filters

log_filters.install()  # before any module of Beam is imported
